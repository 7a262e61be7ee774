"""The steps of all services, as one list for each node and stage."""

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

# One script for each node and stage. All nodes finish a stage before the next starts: a client of a clock or a mount
# needs its server.
STAGES: tuple[Stage, ...] = ("base", "serve", "follow")
TITLES: Mapping[Stage, str] = {
    "base": "Preparing nodes",
    "serve": "Starting servers",
    "follow": "Following servers",
}


@dataclass(frozen=True)
class NodeSteps:
    """The steps of one service for one node in one stage; their names are unique within the service."""

    node: str
    stage: Stage
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """The steps of every node: ``steps[stage][node]``. Each step's name starts with its service's name."""

    steps: Mapping[Stage, Mapping[str, tuple[Step, ...]]]

    def nodes(self, stage: Stage) -> tuple[str, ...]:
        """The nodes that have steps in a stage."""
        return tuple(self.steps.get(stage, {}))


def check_names(names: Sequence[str]) -> None:
    """Check that every name is a service.

    Raises:
        UsageError: a name is not a service.
    """
    for name in names:
        if name not in services.names():
            raise UsageError(f"{name} is not a service", hint=f"one of {', '.join(services.names())}")


def choose(inventory: Inventory, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The services of a command, in order.

    Args:
        inventory: the inventory with ``services:``.
        names: only these; none: all services of the inventory.

    Raises:
        UsageError: a name is not a service, or the inventory does not configure it.
    """
    check_names(names)
    for name in names:
        if name not in inventory.services:
            raise UsageError(
                f"{inventory.path} does not configure the service {name}",
                hint=f"add it below services: in {inventory.path.name}, such as {name}: {{}}",
            )
    return tuple(name for name in services.ordered() if name in (names or inventory.services))


def plan_services(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> Plan:
    """The steps of the services ``names`` for ``nodes``."""
    return collect_steps(
        nodes, ((name, services.get(name).plan(inventory.services[name], inventory)) for name in names)
    )


def servers(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> frozenset[str]:
    """The nodes that are servers of the configured services among ``names``."""
    # A service with packages serves no other node, and its bundle may have been deleted.
    asked = [name for name in names if name in inventory.services and not hasattr(services.get(name), "packages")]
    return frozenset(plan_services(inventory, nodes, asked).nodes("serve"))


def packages(inventory: Inventory, names: Sequence[str]) -> tuple[Packages, ...]:
    """The OS packages that nodes need before the plans of the services ``names`` run."""
    modules = [(services.get(name), inventory.services[name]) for name in names]
    return tuple(module.packages(options, inventory) for module, options in modules if hasattr(module, "packages"))


def plan_verification(inventory: Inventory, nodes: Iterable[Node], names: Sequence[str]) -> Plan:
    """The steps that verify the services ``names`` on ``nodes``."""
    return collect_steps(
        nodes, ((name, services.get(name).verify(inventory.services[name], inventory)) for name in names)
    )


def collect_steps(nodes: Iterable[Node], planned: Iterable[tuple[str, Iterator[NodeSteps]]]) -> Plan:
    """Merge the steps of services, given with their names, for ``nodes``."""
    wanted = [node.name for node in nodes]
    found: dict[Stage, dict[str, list[Step]]] = {stage: {name: [] for name in wanted} for stage in STAGES}
    for service, each in planned:
        for one in each:
            if one.node in wanted:
                found[one.stage][one.node] += [_add_service(service, step) for step in one.steps]
    return Plan(
        {
            stage: {name: tuple(steps) for name, steps in of_nodes.items() if steps}
            for stage, of_nodes in found.items()
            if any(of_nodes.values())
        }
    )


def _add_service(service: str, step: Step) -> Step:
    """Put the service into the step's name, and into its sh, which writes the service's journal."""
    head = f"cc_service={service}\n"
    return replace(step, name=f"{service}: {step.name}", unless=head + step.unless, do=head + step.do)
