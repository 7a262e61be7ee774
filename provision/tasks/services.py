"""``clusterctl services``, and the first part of a deploy: node services applied, verified and undone.

A stage is one script for each node, in one round trip. Every node finishes a stage before the next one starts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision import services
from provision.model import Step, StepResult
from provision.services.kit import plans, scripts
from provision.session import Failure, Outcome

if TYPE_CHECKING:
    from provision.ospackages.node import Packages
    from provision.session import Session

DEADLINE = 300.0  # seconds for a node and stage
Steps = tuple[StepResult, ...]


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
    steps: Mapping[str, Steps]
    seconds: Mapping[str, float] = field(default_factory=dict)
    dry_run: bool = False
    unreached: Mapping[str, str] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether anything was, or would be, changed on any node."""
        return any(step.state in {"changed", "would change"} for steps in self.steps.values() for step in steps)


def apply(
    session: Session, names: Sequence[str] = (), *, scripts_to: Path | None = None, deadline: float = DEADLINE
) -> ServicesResult:
    """Bring the inventory's services to the nodes, and verify those that changed.

    Args:
        session: the command's session; a dry run runs the same scripts without their writes.
        names: only these services; none: all that the inventory asks for.
        scripts_to: a folder for the scripts, for review.
        deadline: seconds for each node and stage.

    Raises:
        UsageError: no such service, or one that the inventory does not ask for.
        NodesFailedError: some nodes failed; the others are done.
    """
    wanted = plans.chosen(session.inventory, names)
    plan = plans.planned(session.inventory, session.nodes, wanted)
    if scripts_to is not None:
        scripts.write(scripts_to, plan)
    done: list[Outcome[Any]] = [
        _bring_packages(session, packages) for packages in plans.packages(session.inventory, wanted)
    ]
    for stage in plans.STAGES:
        done.append(_carry_out(session, stage, plans.TITLES[stage], plan.steps.get(stage, {}), done, deadline))
        if stage == "serve" and not session.dry_run:
            done.append(_without_servers(session, plan, _together(session, done)))
    if not session.dry_run:
        changed = tuple(name for name in wanted if _changed(name, _steps(session, done)))
        good = [node for node in session.nodes if node.name not in _together(session, done).failed]
        verified = _verify(session, plans.verifying(session.inventory, good, changed), deadline) if changed else None
        done += [verified] if verified else []
    _together(session, done).required(*_retry(session, "services apply"))
    return _result(session, wanted, done)


def verify(session: Session, names: Sequence[str] = (), *, deadline: float = DEADLINE) -> ServicesResult:
    """Ask the services on the nodes whether they work. A step that fails says what is wrong.

    Raises:
        UsageError: no such service, or one that the inventory does not ask for.
    """
    wanted = plans.chosen(session.inventory, names)
    outcome = _verify(session, plans.verifying(session.inventory, session.nodes, wanted), deadline)
    return _result(session, wanted, [outcome])


def undo(session: Session, names: Sequence[str] = (), *, deadline: float = DEADLINE) -> ServicesResult:
    """Restore what the nodes had before the services were applied, byte for byte. Servers come last.

    Args:
        session: the command's session; its inventory need not ask for the services any more.
        names: the services; none: all.
        deadline: seconds for each node.

    Raises:
        UsageError: no such service.
        NodesFailedError: some nodes failed; running it again continues where it stopped.
    """
    chosen = plans.known(names) or services.names()
    wanted = tuple(name for name in services.ordered() if name in chosen)
    serving = plans.servers(session.inventory, session.nodes, wanted)
    steps = tuple(scripts.undoing(name) for name in reversed(wanted))
    done: list[Outcome[Any]] = []
    for number, title in enumerate(("Undoing", "Undoing on servers")):
        part = {node.name: steps for node in session.nodes if (node.name in serving) == bool(number)}
        done.append(_carry_out(session, f"undo-{number}", title, part, done, deadline))
    _together(session, done).required(*_retry(session, "services undo"))
    return _result(session, wanted, done)


def _carry_out(
    session: Session,
    key: str,
    title: str,
    steps: Mapping[str, tuple[Step, ...]],
    before: Iterable[Outcome[Any]],
    deadline: float,
) -> Outcome[Steps]:
    """One stage, on the nodes that have steps in it and have not failed in a stage ``before``."""
    failed = _together(session, before).failed
    return session.apply(
        key,
        title,
        {name: mine for name, mine in steps.items() if name not in failed},
        root=True,
        deadline=deadline,
        compiled=lambda mine, token: scripts.script(mine, token, dry_run=session.dry_run),
        state=_state,
    )


def _verify(session: Session, plan: plans.Plan, deadline: float) -> Outcome[Steps]:
    """Ask everything of every node at once. A service that fails does not keep the others from being asked."""
    steps = {
        node.name: tuple(step for stage in plans.STAGES for step in plan.steps.get(stage, {}).get(node.name, ()))
        for node in session.nodes
    }
    return session.apply(
        "verify", "Verifying services", steps, root=True, deadline=deadline, compiled=scripts.verifying, state=_state
    )


def _without_servers(session: Session, plan: plans.Plan, before: Outcome[Any]) -> Outcome[Any]:
    """The failures of nodes whose server failed: they would wait for it in vain."""
    lost = sorted(set(plan.nodes("serve")) & set(before.failed))
    waiting = {name: Failure(f"waits for {', '.join(lost)}, which failed") for name in plan.nodes("follow") if lost}
    return Outcome(session, {}, waiting, changes=True)


def _bring_packages(session: Session, packages: Packages) -> Outcome[Any]:
    """Send the offline repositories to the nodes that lack packages."""
    from provision.tasks import os_packages  # noqa: PLC0415 - the transfer engine, which no other service needs

    return os_packages.bring(session, packages)


def _together(session: Session, done: Iterable[Outcome[Any]]) -> Outcome[Any]:
    return functools.reduce(operator.and_, done, Outcome(session, {}, changes=True))


def _steps(session: Session, done: Iterable[Outcome[Any]]) -> dict[str, Steps]:
    """Every step that ran, by node."""
    found: dict[str, Steps] = {node.name: () for node in session.nodes}
    for outcome in done:
        for name in found:
            found[name] += outcome.failed[name].steps if name in outcome.failed else outcome.ok.get(name) or ()
    return found


def _result(session: Session, wanted: tuple[str, ...], done: Sequence[Outcome[Any]]) -> ServicesResult:
    silent = {name: failure.reason for outcome in done for name, failure in outcome.failed.items() if not failure.steps}
    return ServicesResult(wanted, _steps(session, done), dict(session.seconds), session.dry_run, silent)


def _retry(session: Session, command: str) -> tuple[str, ...]:
    """The option for a hint. A dry run remembers no failed nodes, and services that stop a deploy leave all undone."""
    return () if session.dry_run or session.typed.command not in {"", command} else ("--retry-failed",)


def _changed(service: str, steps: Mapping[str, Steps]) -> bool:
    mine = f"{service}: "
    return any(step.state == "changed" and step.name.startswith(mine) for each in steps.values() for step in each)


def _state(results: Steps) -> str:
    for state in ("changed", "would change"):
        if count := sum(step.state == state for step in results):
            return f"{state} ({count} of {len(results)} steps)"
    return "up to date"
