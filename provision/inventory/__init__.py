"""Loads the inventory and selects a command's nodes.

The submodules are imported on first use, because importing pydantic takes longer than most commands need to start.
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
