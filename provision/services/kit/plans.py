"""What services ask of nodes, as data: duties, gathered to one list of steps for each node and stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from provision import services
from provision.errors import UsageError

if TYPE_CHECKING:
    from provision.model import Inventory, Node, Step
    from provision.ospackages.node import Packages

Stage = Literal["base", "serve", "follow"]

# One script for each node and stage. All nodes end a stage before any begins the next: who follows a clock or mounts
# a folder needs the one that serves it.
STAGES: tuple[Stage, ...] = ("base", "serve", "follow")
TITLES: Mapping[Stage, str] = {
    "base": "Preparing nodes",
    "serve": "Starting servers",
    "follow": "Following servers",
}


@dataclass(frozen=True)
class Duty:
    """Steps of one service for one node in one stage; their names are unique within the service."""

    node: str
    stage: Stage
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """What is to be done on every node: ``steps[stage][node]``, each step's name begins with its service."""

    steps: Mapping[Stage, Mapping[str, tuple[Step, ...]]]

    def nodes(self, stage: Stage) -> tuple[str, ...]:
        """The nodes that have something to do in a stage."""
        return tuple(self.steps.get(stage, {}))


def known(names: Sequence[str]) -> Sequence[str]:
    """The same names.

    Raises:
        UsageError: one of them is no service.
    """
    for name in names:
        if name not in services.names():
            raise UsageError(f"{name} is not a service", hint=f"one of {', '.join(services.names())}")
    return names


def chosen(inventory: Inventory, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The services that a command works on, in their order.

    Args:
        inventory: whose ``services:`` are meant.
        names: only these; none: all that the inventory asks for.

    Raises:
        UsageError: a name that is no service, or one that the inventory does not ask for.
    """
    for name in known(names):
        if name not in inventory.services:
            raise UsageError(
                f"{inventory.path} does not ask for the service {name}",
                hint=f"write it below services: in {inventory.path.name}, such as {name}: {{}}",
            )
    return tuple(name for name in services.ordered() if name in (names or inventory.services))


def planned(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> Plan:
    """The steps of the services ``names`` for ``nodes``."""
    return gathered(nodes, ((name, services.get(name).plan(inventory.services[name], inventory)) for name in names))


def servers(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> frozenset[str]:
    """The nodes that others depend on, by the services of ``names`` that the inventory asks for."""
    # A service with packages serves no other node, and its bundle may have been deleted.
    asked = [name for name in names if name in inventory.services and not hasattr(services.get(name), "packages")]
    return frozenset(planned(inventory, nodes, asked).nodes("serve"))


def packages(inventory: Inventory, names: Sequence[str]) -> tuple[Packages, ...]:
    """The OS packages that nodes need before the plans of the services ``names`` run."""
    modules = [(services.get(name), inventory.services[name]) for name in names]
    return tuple(module.packages(options, inventory) for module, options in modules if hasattr(module, "packages"))


def verifying(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> Plan:
    """The steps that ask the services ``names`` on ``nodes`` whether they do their work."""
    return gathered(nodes, ((name, services.get(name).verify(inventory.services[name], inventory)) for name in names))


def gathered(nodes: Iterable[Node], duties: Iterable[tuple[str, Iterator[Duty]]]) -> Plan:
    """The steps of ``duties``, each with its service's name, for ``nodes``."""
    wanted = [node.name for node in nodes]
    found: dict[Stage, dict[str, list[Step]]] = {stage: {name: [] for name in wanted} for stage in STAGES}
    for service, each in duties:
        for duty in each:
            if duty.node in wanted:
                found[duty.stage][duty.node] += [_named(service, step) for step in duty.steps]
    return Plan(
        {
            stage: {name: tuple(steps) for name, steps in of_nodes.items() if steps}
            for stage, of_nodes in found.items()
            if any(of_nodes.values())
        }
    )


def _named(service: str, step: Step) -> Step:
    """The step as part of its service: its name says so, and its sh knows whose journal it writes."""
    mine = f"cc_service={service}\n"
    return replace(step, name=f"{service}: {step.name}", unless=mine + step.unless, do=mine + step.do)
