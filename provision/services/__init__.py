"""Node services, one file each: adding ``provision/services/NAME.py`` and NAME to ``ORDER`` adds the service NAME.

A service is three pure functions and a model, all about the inventory and never about a node's present state:

``ABOUT``
    what it sets up, a few words.
``Options(Section)``
    the keys of ``services: NAME:`` (pydantic; the loader names every mistake with its line).
``problems(options, inventory) -> Iterator[tuple[str, str]]``
    mistakes that only the whole inventory shows: the key they belong to (or "") and one sentence.
``plan(options, inventory) -> Iterator[Duty]``
    the steps for each node and stage. A step's ``unless`` tells whether it is done already, so that a second apply
    changes nothing; its ``do`` writes an undo entry before it changes anything (``changes`` makes such steps).
``verify(options, inventory) -> Iterator[Duty]``
    steps whose ``unless`` asks the running service, and whose ``do`` says what is wrong and fails.

Undo needs no function: it is the journal that the steps have written on the node, run backwards.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

# The order in which services are set up on a node: packages first, then names, limits and clocks, then what needs
# the network. Undo goes the other way.
ORDER = ("os_packages", "hosts", "limits", "chrony", "nfs", "opensm")


def load(name: str) -> ModuleType:
    """The module of a service that ``ORDER`` has."""
    return import_module(f"provision.services.{name}")
