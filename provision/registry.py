"""Folders in which each file registers itself: services and launchers.

A registered module's name is its file's name, and the package lists the names that a module must define.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


@functools.cache
def module_names(package: str) -> tuple[str, ...]:
    """The names of a package's registered modules, from the names of their files. Imports none of them."""
    folders = importlib.import_module(package).__path__
    return tuple(sorted(each.name for each in pkgutil.iter_modules(folders) if not each.ispkg))


def load_module(package: str, name: str, kind: str, required: Mapping[str, type]) -> ModuleType:
    """Import a registered module.

    Args:
        package: the package's full name.
        name: one of ``module_names``.
        kind: the kind of module, for errors: ``a service``.
        required: the names that it must define, with their types.

    Raises:
        ClusterctlError: its file does not define a required name.
    """
    module = importlib.import_module(f"{package}.{name}")
    for wanted, type_ in required.items():
        value = getattr(module, wanted, None)
        if value is None or not isinstance(value, type_):
            raise ClusterctlError(f"{module.__file__} is not {kind}: it does not define {wanted}")
    return module
