"""``clusterctl services``, and the first part of a deploy: node services applied, asked, verified, undone.

A stage is one script a node, in one round trip; every node ends a stage before any begins the next.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision import services
from provision.errors import NodesFailedError, UsageError
from provision.model import Emit, Inventory, Node, Progress, Result, StageFinished, StageStarted, Step, StepResult
from provision.render import render
from provision.script import compile_steps, parse
from provision.services import plans
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import failures

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

STATE = PurePosixPath("/var/lib/clusterctl/services")  # on a node: the journals that undo reads
DEADLINE = 300.0  # seconds for a node and stage
_LOCK_SECONDS = 30  # how long a script waits for another command's to end
REVIEW = "review"  # the token of scripts that are written for people


@dataclass(frozen=True)
class ServicesResult:
    """What became of services.

    Attributes:
        services: their names.
        steps: by node name, in the order in which they ran.
        seconds: of each stage.
        dry_run: nothing was written.
    """

    services: tuple[str, ...]
    steps: Mapping[str, tuple[StepResult, ...]]
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False

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
        _write_scripts(scripts_to, plan)
    with Connections(inventory, prompts) as connections:
        work = _Work(connections, nodes, deadline, emit)
        if "os_packages" in wanted:
            work.failed.update(_bring_packages(inventory, nodes, connections, dry_run=dry_run, emit=emit))
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
    work.raise_failed("services apply")
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

    Raises:
        UsageError: a service that there is not, or that the inventory does not ask for.
        NodesFailedError: nodes that could not be asked.
    """
    wanted = plans.chosen(inventory, names)
    with Connections(inventory, prompts) as connections:
        work = _Work(connections, nodes, deadline, emit)
        work.verify(plans.verifying(inventory, nodes, wanted))
    unreached = {name: why for name, why in work.failed.items() if name not in work.wrong}
    if unreached:
        work.failed = unreached
        work.raise_failed("services verify")
    return ServicesResult(wanted, work.done(), work.seconds)


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
    for name in names:
        if name not in services.ORDER:
            raise UsageError(f"{name} is not a service", hint=f"one of {', '.join(services.ORDER)}")
    wanted = tuple(name for name in services.ORDER if name in (names or services.ORDER))
    # os_packages serves nobody, and its bundle may be gone by now.
    asked = tuple(name for name in wanted if name in inventory.services and name != "os_packages")
    serving = set(plans.planned(inventory, nodes, asked).nodes("serve"))
    steps = tuple(_undoing(name) for name in reversed(wanted))
    with Connections(inventory, prompts) as connections:
        work = _Work(connections, nodes, deadline, emit)
        for number, title in ((0, "Undoing"), (1, "Undoing on servers")):
            part = {node.name: steps for node in nodes if (node.name in serving) == bool(number)}
            work.carry_out(f"undo-{number}", title, part, dry_run=dry_run)
    work.raise_failed("services undo")
    return ServicesResult(wanted, work.done(), work.seconds, dry_run)


def _undoing(name: str) -> Step:
    folder = str(STATE / name)
    return Step(
        f"{name}: undo",
        unless=f"[ ! -d {folder} ]",
        do=f"cc_service={name}\n{render('services/undo.sh.j2')}",
    )


class _Work:
    """What is known of every node while stages are carried out."""

    def __init__(self, connections: Connections, nodes: Iterable[Node], deadline: float, emit: Emit) -> None:
        self.steps: dict[str, list[StepResult]] = {node.name: [] for node in nodes}
        self.failed: dict[str, str] = {}
        self.wrong: set[str] = set()  # nodes that failed by what a step said, not for want of an answer
        self.seconds: dict[str, float] = {}
        self._nodes = tuple(nodes)
        self._connections, self._deadline, self._emit = connections, deadline, emit

    @property
    def changed(self) -> bool:
        """Whether a step changed anything so far."""
        return any(step.state == "changed" for steps in self.steps.values() for step in steps)

    def done(self) -> dict[str, tuple[StepResult, ...]]:
        """What became of every step."""
        return {name: tuple(steps) for name, steps in self.steps.items()}

    def carry_out(self, stage: str, title: str, steps: Mapping[str, tuple[Step, ...]], *, dry_run: bool) -> None:
        """One stage, on the nodes that have steps in it and have not failed."""
        self._run(stage, title, steps, lambda mine, token: script(mine, token, dry_run=dry_run))

    def verify(self, plan: plans.Plan) -> None:
        """Ask everything of every node at once; what is wrong with one service keeps no other from being asked."""
        together = {
            node.name: tuple(step for stage in plans.STAGES for step in plan.steps.get(stage, {}).get(node.name, ()))
            for node in self._nodes
        }
        self._run("verify", "Verifying services", together, verifying)

    def raise_failed(self, command: str) -> None:
        """One error for all nodes that failed."""
        if self.failed:
            others = "; the others are done" if len(self.failed) < len(self._nodes) else ""
            again = "" if command == "services verify" else " --retry-failed"
            raise NodesFailedError(
                f"{command} failed on {len(self.failed)} of {len(self._nodes)} nodes{others}",
                reasons=self.failed,
                hint=f"mend what is named, then: clusterctl {command}{again}",
            )

    def _run(
        self,
        stage: str,
        title: str,
        steps: Mapping[str, tuple[Step, ...]],
        compiled: Callable[[Sequence[Step], str], str],
    ) -> None:
        nodes = [node for node in self._nodes if steps.get(node.name) and node.name not in self.failed]
        if not nodes:
            return
        began = time.monotonic()
        self._emit(StageStarted(stage, title, len(nodes), "nodes"))
        tokens = {node.name: secrets.token_hex(8) for node in nodes}
        finished = itertools.count(1)

        def work(node: Node) -> Result:
            text = compiled(steps[node.name], tokens[node.name])
            result = self._connections[node].run(text, root=True, deadline=self._deadline)
            self._emit(Progress(stage, next(finished), len(nodes)))
            return result

        answers = fan_out(nodes, work)
        results = {
            name: parse(tokens[name], answer.out) for name, answer in answers.items() if isinstance(answer, Result)
        }
        for name, each in results.items():
            self.steps[name] += each
            if any(step.state == "failed" for step in each):
                self.wrong.add(name)
        self.failed |= failures(self._connections.inventory, nodes, answers, tokens)
        self.seconds[stage] = time.monotonic() - began
        states = {node.name: "failed" if node.name in self.failed else _state(results[node.name]) for node in nodes}
        self._emit(StageFinished(stage, self.seconds[stage], states))


def _state(results: Sequence[StepResult]) -> str:
    for state in ("changed", "would change"):
        if count := sum(step.state == state for step in results):
            return f"{state} ({count} of {len(results)} steps)"
    return "as it should be"


def script(steps: Sequence[Step], token: str, *, dry_run: bool = False, state: PurePosixPath = STATE) -> str:
    """The script for one node and stage; a dry run takes no lock, since it writes nothing."""
    library = render("services/library.sh.j2", state=state)
    lock = "" if dry_run else render("services/lock.sh.j2", folder=state.parent, seconds=_LOCK_SECONDS)
    return compile_steps(steps, token=token, dry_run=dry_run, prelude=library + lock)


def verifying(steps: Sequence[Step], token: str) -> str:
    """The script that asks a node's services."""
    library = render("services/library.sh.j2", state=STATE)
    return compile_steps(steps, token=token, prelude=library, keep_going=True)


def _changed(service: str, steps: Mapping[str, Sequence[StepResult]]) -> bool:
    return any(
        step.state == "changed" and step.name.startswith(f"{service}: ") for each in steps.values() for step in each
    )


def _bring_packages(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, *, dry_run: bool, emit: Emit
) -> dict[str, str]:
    """The offline repositories to the nodes that lack them; the nodes that could not take theirs."""
    from provision.tasks import os_packages  # noqa: PLC0415 - the transfer engine, which no other service needs

    return os_packages.bring(inventory, nodes, connections, dry_run=dry_run, emit=emit)


def _write_scripts(folder: Path, plan: plans.Plan) -> None:
    """The scripts as they would run, one file for each node and stage."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, stage in enumerate(plans.STAGES, 1):
            for name, steps in plan.steps.get(stage, {}).items():
                path = folder / f"{name}-0{number}-{stage}.sh"
                path.write_text(script(steps, REVIEW), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the scripts to {folder}: {error.strerror}") from error
