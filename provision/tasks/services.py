"""``clusterctl services``, and the first part of a deploy: node services applied, asked, verified, undone.

A stage is one script a node, in one round trip; every node ends a stage before any begins the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from provision import services
from provision.model import Emit, Inventory, Node, StepResult
from provision.services.kit import plans, scripts
from provision.ssh.remote import Connections
from provision.tasks.stages import Work

if TYPE_CHECKING:
    from provision.ospackages.node import Packages
    from provision.ssh.prompts import Prompts

DEADLINE = 300.0  # seconds for a node and stage


@dataclass(frozen=True)
class ServicesResult:
    """What became of services.

    Attributes:
        services: their names.
        steps: by node name, in the order in which they ran.
        seconds: of each stage.
        dry_run: nothing was written.
        unreached: of a verification, the nodes that could not be asked, each with its reason.
    """

    services: tuple[str, ...]
    steps: Mapping[str, tuple[StepResult, ...]]
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False
    unreached: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether anything was, or would be, changed on any node."""
        return any(step.state in {"changed", "would change"} for steps in self.steps.values() for step in steps)


def apply(
    inventory: Inventory,
    nodes: Sequence[Node],
    names: Sequence[str] = (),
    *,
    prompts: Prompts | None = None,
    connections: Connections | None = None,
    dry_run: bool = False,
    scripts_to: Path | None = None,
    deadline: float = DEADLINE,
    emit: Emit,
) -> ServicesResult:
    """Bring the services of the inventory to its nodes, and verify those that were changed.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant; the plan itself knows all of them.
        names: only these services; none: all that the inventory asks for.
        prompts: how to ask for a password or about a host key; None: nobody can answer.
        connections: those of the command that this is a part of, in place of new ones that would ask again.
        dry_run: run the same scripts with their writes left out.
        scripts_to: with ``dry_run``, a folder that the scripts are written to, for review.
        deadline: seconds that a node has for a stage.
        emit: is told about the progress.

    Raises:
        UsageError: a service that there is not, or that the inventory does not ask for.
        NodesFailedError: some nodes failed, the others are done.
    """
    wanted = plans.chosen(inventory, names)
    plan = plans.planned(inventory, nodes, wanted)
    if scripts_to is not None:
        scripts.write(scripts_to, plan)
    with nullcontext(connections) if connections else Connections(inventory, prompts) as pool:
        work = Work(pool, nodes, deadline, emit)
        for packages in plans.packages(inventory, wanted):
            work.failed.update(_bring_packages(inventory, nodes, pool, packages, dry_run=dry_run, emit=emit))
        for stage in plans.STAGES:
            work.carry_out(stage, plans.TITLES[stage], plan.steps.get(stage, {}), dry_run=dry_run)
            if stage == "serve" and work.failed and not dry_run:
                served = set(plan.nodes("serve"))
                if served & set(work.failed):
                    lost = ", ".join(sorted(served & set(work.failed)))
                    waiting = [name for name in plan.nodes("follow") if name not in work.failed]
                    work.failed |= dict.fromkeys(waiting, f"waits for {lost}, which failed")
        if not dry_run and work.changed:
            changed = [name for name in wanted if _changed(name, work.steps)]
            good = [node for node in nodes if node.name not in work.failed]
            work.verify(plans.verifying(inventory, good, changed))
    work.raise_failed("services apply", dry_run=dry_run)
    return ServicesResult(wanted, work.done(), work.seconds, dry_run)


def verify(
    inventory: Inventory,
    nodes: Sequence[Node],
    names: Sequence[str] = (),
    *,
    prompts: Prompts | None = None,
    deadline: float = DEADLINE,
    emit: Emit,
) -> ServicesResult:
    """Ask the services on the nodes whether they do their work; a step that fails says what is wrong.

    Returns:
        What every node said; ``unreached`` has those that could not be asked.

    Raises:
        UsageError: a service that there is not, or that the inventory does not ask for.
    """
    wanted = plans.chosen(inventory, names)
    with Connections(inventory, prompts) as connections:
        work = Work(connections, nodes, deadline, emit)
        work.verify(plans.verifying(inventory, nodes, wanted))
    unreached = {name: why for name, why in work.failed.items() if name not in work.wrong}
    return ServicesResult(wanted, work.done(), work.seconds, unreached=unreached)


def undo(
    inventory: Inventory,
    nodes: Sequence[Node],
    names: Sequence[str] = (),
    *,
    prompts: Prompts | None = None,
    dry_run: bool = False,
    deadline: float = DEADLINE,
    emit: Emit,
) -> ServicesResult:
    """Bring back what was there before the services were applied, byte for byte; those who follow go first.

    Args:
        inventory: the cluster; it need not ask for the services any more.
        nodes: those of its nodes that are meant.
        names: the services; none: all.
        prompts: how to ask.
        dry_run: say where there is something to undo.
        deadline: seconds that a node has.
        emit: is told about the progress.

    Raises:
        UsageError: a name that is no service.
        NodesFailedError: some nodes failed; a rerun goes on where they stopped.
    """
    chosen = plans.known(names) or services.names()
    wanted = tuple(name for name in services.ordered() if name in chosen)
    serving = plans.servers(inventory, nodes, wanted)
    steps = tuple(scripts.undoing(name) for name in reversed(wanted))
    with Connections(inventory, prompts) as connections:
        work = Work(connections, nodes, deadline, emit)
        for number, title in ((0, "Undoing"), (1, "Undoing on servers")):
            part = {node.name: steps for node in nodes if (node.name in serving) == bool(number)}
            work.carry_out(f"undo-{number}", title, part, dry_run=dry_run)
    work.raise_failed("services undo", dry_run=dry_run)
    return ServicesResult(wanted, work.done(), work.seconds, dry_run)


def _changed(service: str, steps: Mapping[str, Sequence[StepResult]]) -> bool:
    return any(
        step.state == "changed" and step.name.startswith(f"{service}: ") for each in steps.values() for step in each
    )


def _bring_packages(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    packages: Packages,
    *,
    dry_run: bool,
    emit: Emit,
) -> dict[str, str]:
    """The offline repositories to the nodes that lack them; the nodes that could not take theirs."""
    from provision.tasks import os_packages  # noqa: PLC0415 - the transfer engine, which no other service needs

    return os_packages.bring(inventory, nodes, connections, packages, dry_run=dry_run, emit=emit)
