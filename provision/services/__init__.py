"""Node services. Each file of this folder is a service, and the file is its registration.

A service is about the inventory, never about a node's present state. Its file defines the names in ``REQUIRED``:

``ABOUT``
    what it sets up, in a few words; help texts and docs/services.md show it.
``AFTER``
    names of the services that come before it, when the inventory asks for them. Undo runs in the opposite order.
``Options(Section)``
    the keys of ``services: NAME:``. The loader reports each mistake with its line.
``problems(options, inventory) -> Iterator[tuple[str, str]]``
    mistakes that only the whole inventory shows: the key (or "") and one sentence.
``plan(options, inventory) -> Iterator[Duty]``
    the steps for each node and stage. A step's ``unless`` tests whether it is done, so that a second apply changes
    nothing. Its ``do`` writes an undo entry before it changes anything; ``kit.changes`` makes such steps.
``verify(options, inventory) -> Iterator[Duty]``
    steps whose ``unless`` asks the running service, and whose ``do`` says what is wrong and fails.

It may also define ``packages(options, inventory) -> Packages``: bundles of OS packages that a node needs before its
plan runs.

Undo needs no function: it runs the journal that the steps wrote on the node, backwards. ``kit`` is for all services.
"""

from __future__ import annotations

import functools
import graphlib
import importlib
import pkgutil
from types import ModuleType

from provision.errors import ClusterctlError

REQUIRED = {"ABOUT": str, "AFTER": tuple, "Options": type, **dict.fromkeys(("problems", "plan", "verify"), object)}


@functools.cache
def names() -> tuple[str, ...]:
    """Every service's name, which is its file's. Imports none of them."""
    return tuple(sorted(each.name for each in pkgutil.iter_modules(__path__) if not each.ispkg))


@functools.cache
def get(name: str) -> ModuleType:
    """The service of a name that ``names`` has.

    Raises:
        ClusterctlError: its file lacks a required name, or comes after a service that does not exist.
    """
    module = importlib.import_module(f"{__name__}.{name}")
    for wanted, kind in REQUIRED.items():
        if not isinstance(found := getattr(module, wanted, None), kind) or found is None:
            raise ClusterctlError(f"{module.__file__} is not a service: it does not define {wanted}")
    if unknown := set(module.AFTER) - set(names()):
        raise ClusterctlError(f"{module.__file__}: AFTER has {', '.join(sorted(unknown))}, which is not a service")
    return module


@functools.cache
def ordered() -> tuple[str, ...]:
    """Every service's name, each after those in its ``AFTER``.

    Raises:
        ClusterctlError: a file is not a service, or services come after each other in a circle.
    """
    try:
        return tuple(graphlib.TopologicalSorter({name: get(name).AFTER for name in names()}).static_order())
    except graphlib.CycleError as error:
        raise ClusterctlError(f"services come after each other in a circle: {' -> '.join(error.args[1])}") from error
