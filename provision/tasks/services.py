"""``clusterctl services``, also the first part of a deploy: apply, verify and undo node services.

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
from provision.errors import ClusterctlError
from provision.model import Node, Part, Step, StepResult, Wire
from provision.output_text import fold_equal
from provision.services.kit import plans, scripts
from provision.session import Failure, Lock, Outcome
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.ospackages.node import Choice, Facts, Packages
    from provision.session import Session

DEADLINE = 300.0  # seconds for a node and stage
_PACKAGES_DEADLINE = 120.0  # seconds for apt to read an index and to simulate
Steps = tuple[StepResult, ...]


@dataclass(frozen=True)
class ServicesResult:
    """The result of a command for services.

    Attributes:
        services: their names.
        steps: results by node name, in the order in which the steps ran.
        seconds: of each stage.
        dry_run: nothing was written.
        unreached: nodes that a verification could not reach, each with the reason.
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
    """Apply the inventory's services to the nodes, and verify the changed ones.

    Args:
        session: the command's session; a dry run runs the same scripts without their writes.
        names: only these services; none: all services of the inventory.
        scripts_to: a folder for the scripts, for review.
        deadline: seconds for each node and stage.

    Raises:
        UsageError: no such service, or the inventory does not configure it.
        NodesFailedError: some nodes failed; the others are done.
    """
    wanted = plans.choose(session.inventory, names)
    plan = plans.plan_services(session.inventory, session.nodes, wanted)
    if scripts_to is not None:
        scripts.write_scripts(scripts_to, plan)
    done: list[Outcome[Any]] = [
        _send_packages(session, packages) for packages in plans.packages(session.inventory, wanted)
    ]
    for stage in plans.STAGES:
        done.append(_run_stage(session, stage, plans.TITLES[stage], plan.steps.get(stage, {}), done, deadline))
        if stage == "serve" and not session.dry_run:
            done.append(_skip_clients(session, plan, _merge(session, done)))
    if not session.dry_run:
        changed = tuple(name for name in wanted if _has_changed(name, _steps(session, done)))
        good = [node for node in session.nodes if node.name not in _merge(session, done).failed]
        if changed:
            done.append(_verify(session, plans.plan_verification(session.inventory, good, changed), deadline))
    _merge(session, done).required(*_retry(session, "services apply"))
    return _result(session, wanted, done)


def verify(session: Session, names: Sequence[str] = (), *, deadline: float = DEADLINE) -> ServicesResult:
    """Verify the services on the nodes. The message of a failed step is the problem.

    Raises:
        UsageError: no such service, or the inventory does not configure it.
    """
    wanted = plans.choose(session.inventory, names)
    outcome = _verify(session, plans.plan_verification(session.inventory, session.nodes, wanted), deadline)
    return _result(session, wanted, [outcome])


def undo(session: Session, names: Sequence[str] = (), *, deadline: float = DEADLINE) -> ServicesResult:
    """Restore the state of the nodes before the services were applied, byte for byte. Servers come last.

    Args:
        session: the command's session; its inventory may no longer configure the services.
        names: the services; none: all.
        deadline: seconds for each node.

    Raises:
        UsageError: no such service.
        NodesFailedError: some nodes failed; running it again continues where it stopped.
    """
    plans.check_names(names)
    chosen = names or services.names()
    wanted = tuple(name for name in services.ordered() if name in chosen)
    serving = plans.servers(session.inventory, session.nodes, wanted)
    steps = tuple(scripts.undo_step(name) for name in reversed(wanted))
    done: list[Outcome[Any]] = []
    for number, title in enumerate(("Undoing", "Undoing on servers")):
        part = {node.name: steps for node in session.nodes if (node.name in serving) == bool(number)}
        done.append(_run_stage(session, f"undo-{number}", title, part, done, deadline))
    _merge(session, done).required(*_retry(session, "services undo"))
    return _result(session, wanted, done)


def _run_stage(
    session: Session,
    key: str,
    title: str,
    steps: Mapping[str, tuple[Step, ...]],
    before: Iterable[Outcome[Any]],
    deadline: float,
) -> Outcome[Steps]:
    """Run a stage on the nodes that have steps in it and did not fail in a stage ``before``."""
    failed = _merge(session, before).failed
    return session.apply(
        key,
        title,
        {name: mine for name, mine in steps.items() if name not in failed},
        root=True,
        deadline=deadline,
        compiled=lambda mine, token: scripts.apply_script(mine, token, dry_run=session.dry_run),
        state=_state,
    )


def _verify(session: Session, plan: plans.Plan, deadline: float) -> Outcome[Steps]:
    """Verify all services of a node in one script, which continues after a failed step."""
    steps = {
        node.name: tuple(step for stage in plans.STAGES for step in plan.steps.get(stage, {}).get(node.name, ()))
        for node in session.nodes
    }
    return session.apply(
        "verify",
        "Verifying services",
        steps,
        root=True,
        deadline=deadline,
        compiled=scripts.verify_script,
        state=_state,
    )


def _skip_clients(session: Session, plan: plans.Plan, before: Outcome[Any]) -> Outcome[Any]:
    """The failures of nodes with a failed server, which would otherwise wait until their deadline."""
    lost = sorted(set(plan.nodes("serve")) & set(before.failed))
    waiting = {name: Failure(f"waits for {', '.join(lost)}, which failed") for name in plan.nodes("follow") if lost}
    return Outcome(session, {}, waiting, changes=True)


def _send_packages(session: Session, packages: Packages) -> Outcome[Any]:
    """Send bundles of OS packages to the nodes that lack packages, before the service installs them.

    Returns:
        The nodes where the packages cannot be installed, in ``failed``; nothing was changed there.

    Raises:
        BundleError: a bundle is damaged.
    """
    found = _compare_packages(session, packages)
    done: Outcome[Any] = Outcome(session, {}, found.failed, changes=True)
    for choice in () if session.dry_run else packages.choices:
        lacking = [node for node in found.of(session.nodes) if found.ok[node.name].lacks]
        done &= _send_bundle(session, choice, [node for node in lacking if found.ok[node.name].name == choice.name])
    return Outcome(session, {}, done.failed, changes=True)


def _compare_packages(session: Session, packages: Packages) -> Outcome[Facts]:
    """Simulate the installation on every node.

    Warns about packages that will be removed, and about processes that the installation will wait for.
    """
    from provision.ospackages import node as on_node  # noqa: PLC0415 - no other service needs it

    chosen = packages.choices
    script, index = on_node.facts(chosen), on_node.index(chosen)

    def ask(node: Node) -> Facts:
        result = session.run(node, script, stdin=index, deadline=_PACKAGES_DEADLINE)
        if result.rc != 0:
            raise ClusterctlError(" ".join((result.err or result.out).split()) or "its packages could not be listed")
        with reading(node):
            facts = on_node.read(result.out)
        if why := on_node.judge(facts, chosen, packages.replace):
            raise ClusterctlError(why)
        return facts

    def state(facts: Facts) -> str:
        return f"lacks {', '.join(facts.lacks)}" if facts.lacks else "complete"

    outcome = session.work("os packages", "Comparing packages", ask, state=state)
    removed = {name: ", ".join((facts.changes or {}).get("remove", ())) for name, facts in outcome.ok.items()}
    for text, names in fold_equal({name: text for name, text in removed.items() if text}).items():
        session.warn(f"{names}: {text} will be removed; `clusterctl services undo` restores it")
    for name, facts in outcome.ok.items():
        if facts.lacks and facts.holder:
            pid, _, program = facts.holder.partition(" ")
            wait = f"installing waits up to {on_node.LOCK_SECONDS} s for it"
            session.warn(f"{name}: {program} (process {pid}) is using dpkg; {wait}")
    return outcome


def _send_bundle(session: Session, choice: Choice, nodes: Sequence[Node]) -> Outcome[Any]:
    from provision.ospackages import node as on_node  # noqa: PLC0415 - the transfer engine, which no other service needs
    from provision.session.sending import send  # noqa: PLC0415
    from provision.transfer import Target  # noqa: PLC0415

    script, folder = on_node.opening(choice), str(choice.folder)

    def open_folder(node: Node) -> bool:
        return "ssh" in session.output(node, script, root=True, deadline=_PACKAGES_DEADLINE).split()

    opened = session.each(open_folder, on=nodes, changes=True)
    if not opened.ok:
        return opened
    with session.locked(Lock(f"{folder}/lock"), on=opened.of(nodes)):
        targets = [
            Target(node, f"{folder}/transfer", f"{folder}/tree", "plain", opened.ok[node.name])
            for node in opened.of(nodes)
        ]
        parts: dict[Wire, Sequence[Part]] = {"plain": on_node.parts(choice)}
        return opened & send(session, "send os packages", choice.bundle.path.name, targets, parts).outcome


def _merge(session: Session, done: Iterable[Outcome[Any]]) -> Outcome[Any]:
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
    """The option for the hint. A dry run remembers no failed nodes; in a deploy, all nodes remain to do."""
    return () if session.dry_run or session.typed.command not in {"", command} else ("--retry-failed",)


def _has_changed(service: str, steps: Mapping[str, Steps]) -> bool:
    head = f"{service}: "
    return any(step.state == "changed" and step.name.startswith(head) for each in steps.values() for step in each)


def _state(results: Steps) -> str:
    for state in ("changed", "would change"):
        if count := sum(step.state == state for step in results):
            return f"{state} ({count} of {len(results)} steps)"
    return "up to date"
