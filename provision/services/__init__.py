"""Node services. Each file in this folder is a service; adding a file registers it.

A service depends on the inventory only, never on the current state of a node. Its file defines the names in
``REQUIRED``:

``ABOUT``
    a short description; help texts and docs/services.md show it.
``AFTER``
    names of the services that must be applied first. Undo runs in the opposite order.
``Options(Section)``
    the keys of ``services: NAME:``. The loader reports each mistake with its line.
``problems(options, inventory) -> Iterator[tuple[str, str]]``
    mistakes that need the whole inventory to detect: the key (or "") and one sentence.
``plan(options, inventory) -> Iterator[NodeSteps]``
    the steps for each node and stage. A step's ``unless`` tests whether it is done, so that a second apply changes
    nothing. Its ``do`` writes an undo entry before it changes anything; ``kit.changes`` creates such steps.
``verify(options, inventory) -> Iterator[NodeSteps]``
    steps whose ``unless`` queries the running service, and whose ``do`` prints the problem and fails.

It may also define ``packages(options, inventory) -> Packages``: bundles of OS packages that a node needs before its
plan runs.

Undo needs no function: it runs the journal that the steps wrote on the node, backwards. All services share ``kit``.
"""

from __future__ import annotations

import functools
import graphlib
from types import ModuleType

from provision.errors import ClusterctlError
from provision.registry import load_module, module_names

REQUIRED = {"ABOUT": str, "AFTER": tuple, "Options": type, **dict.fromkeys(("problems", "plan", "verify"), object)}


@functools.cache
def names() -> tuple[str, ...]:
    """The names of all services, from the names of their files. Imports none of them."""
    return module_names(__name__)


@functools.cache
def get(name: str) -> ModuleType:
    """Import the service with this name, which must be one of ``names``.

    Raises:
        ClusterctlError: its file lacks a required name, or its ``AFTER`` contains a service that does not exist.
    """
    module = load_module(__name__, name, "a service", REQUIRED)
    if unknown := set(module.AFTER) - set(names()):
        raise ClusterctlError(f"{module.__file__}: AFTER contains {', '.join(sorted(unknown))}, which is not a service")
    return module


@functools.cache
def ordered() -> tuple[str, ...]:
    """The names of all services, each after those in its ``AFTER``.

    Raises:
        ClusterctlError: a file is not a service, or the order is circular.
    """
    try:
        return tuple(graphlib.TopologicalSorter({name: get(name).AFTER for name in names()}).static_order())
    except graphlib.CycleError as error:
        raise ClusterctlError(f"AFTER is circular: {' -> '.join(error.args[1])}") from error
