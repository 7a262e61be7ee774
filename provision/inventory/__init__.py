"""The inventory: from a YAML file to the nodes that a command is to work on.

What reads the file is imported when it is asked for: pydantic takes longer to import than most commands to begin.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provision.inventory.loading import load
    from provision.inventory.local import local_inventory
    from provision.inventory.names import likely_typo
    from provision.inventory.selection import fold, select

__all__ = ["fold", "likely_typo", "load", "local_inventory", "select"]

_MODULES = {
    "fold": "selection",
    "likely_typo": "names",
    "load": "loading",
    "local_inventory": "local",
    "select": "selection",
}


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
