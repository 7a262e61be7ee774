"""``clusterctl resume``: continue a run that has ended from its newest complete checkpoint, on its nodes or fewer.

They have the run's folder with its code and its plans. The plans are read back from there, so any machine with the
inventory can resume a run. Only the ports, the agents' token and the number of restarts are new.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.inventory import fold
from provision.launchers import arranged
from provision.launchers.kit.plans import saving_to
from provision.model import Node
from provision.render import quote
from provision.run import plan_name, record, world_size
from provision.run.environment import STARTED_WITH, started_on
from provision.run.preflight import preflight, to_record
from provision.run.record import TrainResult
from provision.run.spec import VISIBLE
from provision.slurm import Allocation, Options
from provision.tasks import slurm
from provision.tasks.gate import GateOptions, gate
from provision.tasks.resume_arg import AskResume, with_resume_arg
from provision.tasks.runs import by_name, find, refuse_others, run_folder
from provision.tasks.slurm import On
from provision.tasks.start import Following
from provision.tasks.train import link_addresses
from trainer.agent.contract.plan import Copies, Plan, from_json
from trainer.agent.contract.untrusted import UntrustedError

if TYPE_CHECKING:
    from provision.run import Facts
    from provision.run.found import Run
    from provision.session import Session

_DEADLINE = 30.0


@dataclass(frozen=True)
class CopiesOptions:
    """How checkpoints are copied, see ``trainer.agent.contract.plan.Copies``; None: as before."""

    peers: int | None = None
    space: int | None = None
    rate: int | None = None
    memory: bool | None = None


@dataclass(frozen=True)
class ResumeOptions:
    """How a run resumes.

    Attributes:
        force: continue although the gate refuses nodes.
        count: on the first nodes of the run; None: on all that the session has.
        restarts: how often it may restart automatically; None: as before.
        following: how it is followed.
        resume_arg: the program's arguments to resume, which the run keeps; None: as before.
        ask_resume: asks for them if they are not known; None: there is no terminal.
        notify: the shell command for events of the run, which the run keeps; None: as before; empty: none.
        copies: how checkpoints are copied, where it differs from before.
        allocation: the Slurm job in which this command runs; None: none.
    """

    force: bool = False
    count: int | None = None
    restarts: int | None = None
    following: Following = field(default_factory=Following)
    resume_arg: str | None = None
    ask_resume: AskResume | None = None
    notify: str | None = None
    copies: CopiesOptions = field(default_factory=CopiesOptions)
    allocation: Allocation | None = None


def resume(session: Session, word: str | None, options: ResumeOptions) -> TrainResult:
    """Resume a run on the session's nodes among its own.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        options: how it resumes.

    Raises:
        UsageError: no run matches, it is running, it has finished, or it cannot be resumed.
        PreflightError: it is another user's, or a node cannot take part.
        NodesFailedError: nodes of it do not answer.
        RunFailedError: it failed; every node was stopped.
        InterruptedByUser: it was stopped.
    """
    inventory = session.inventory
    run, found = find(session, word, on=inventory.nodes)
    refuse_others(session, run, found, others_too=False)
    chosen = remaining(session, run, found.unreachable, options.count)
    refuse_resume(session, run, found.unreachable, chosen=chosen)
    members = [by_name(inventory)[name] for name in chosen or run.members]
    spares = [by_name(inventory)[name] for name in _spares(session, run, options.count)]
    nodes = [*members, *spares]
    plans = _plans(session, run, nodes)
    before = plans[0].nnodes
    refuse_plans(plans)
    kept = record.read(record.folder_of(inventory.path, run.id)) or {}
    text = options.resume_arg
    if text is None and options.ask_resume and kept.get("resume_arg", "") is None:
        text = options.ask_resume(f"the program of run {run.id}")
    if text is not None:
        plans = with_resume_arg(plans, text)
    limited = {plan.node: plan.env.get(VISIBLE) for plan in plans}
    visible = {name: str(gpus) for name, gpus in limited.items() if gpus is not None}
    strict = GateOptions(force=options.force, visible=visible)
    on = _slurm(session, run.id, members[0], options.allocation)
    least, count = plans[0].min_nodes, plans[0].processes
    taken = None
    if on is not None:
        taken = slurm.choose(session, nodes, on, None, count, spares=len(spares), min_nodes=least)
    with slurm.reserve(session, run.id, nodes, on, taken) as reserved:
        with gate(session, nodes, run.id, None, strict) as passed:
            head = passed.answers[members[0].name].facts
            others: tuple[tuple[str, int], ...] = ()
            if spares or plans[0].min_nodes is not None:
                names = [node.name for node in nodes[1:]]
                others = link_addresses([passed.answers[name].facts for name in names], names)
            plans = arranged(plans, members[0].train_address, len(members), others)
            if len(members) < before:
                _warn_fewer(session, run, members, before, plans, found.unreachable)
            if options.notify is not None:
                plans = [plan._replace(notify=options.notify or None) for plan in plans]
            plans = with_copies(plans, options.copies, str(run_folder(inventory, run.id)))
            fresh = renewed(plans, head, token=secrets.token_hex(16), restarts=options.restarts)
        about = {
            "master": f"{members[0].train_address}:{head.port}",
            "prefix": plans[0].prefix,
            "folder": str(run_folder(inventory, run.id)),
            "launcher": kept.get("launcher"),
            "argv": kept.get("argv"),
            "unsent": kept.get("unsent", {}),
            "resume_arg": kept.get("resume_arg") if text is None else text,
            **{name: kept[name] for name in STARTED_WITH if name in kept},
            **started_on({node.name: passed.answers[node.name].facts for node in passed.nodes}),
            "preflight": to_record(preflight(passed.findings, passed.dropped)),
        }
        interfaces = {name: answer.facts.interface for name, answer in passed.answers.items()}
        return reserved.start(nodes, run.id, fresh, about, interfaces, options.following)


def _spares(session: Session, run: Run, count: int | None) -> tuple[str, ...]:
    """The run's spares that can still replace a node: none if the user chose a number of nodes."""
    allowed = {node.name for node in session.nodes}
    return () if count is not None else tuple(name for name in run.spares if name in allowed)


def _slurm(session: Session, run: str, node: Node, allocation: Allocation | None) -> On | None:
    """How Slurm starts a run: in this command's allocation, or as before; None: it does not.

    Raises:
        UsageError: the run's job is in Slurm's queue, and resumes it there.
    """
    before = slurm.started_with(session, run, node)
    if before is not None:
        slurm.refuse_queued(session, run, node, before[1])
    if allocation is None and (before is None or before[0] is None):
        return None
    return On(before[0] or Options() if before else Options(), allocation)


def remaining(session: Session, run: Run, unreachable: Mapping[str, str], count: int | None) -> tuple[str, ...] | None:
    """The nodes of a run on which it continues, in the order of their ranks; None: the user chose none, so all.

    Raises:
        UsageError: none of the run's nodes was chosen, or it has fewer than ``count``.
    """
    if count is None and len(session.nodes) == len(session.inventory.nodes):
        return None
    allowed = {node.name for node in session.nodes}
    among = [name for name in run.members if name in allowed]
    ran = f"run {run.id} ran on {fold(run.members)}"
    if not among:
        raise UsageError(f"{ran}, and none of these nodes was chosen", hint=f"choose among {fold(run.members)}")
    if count is None:
        return tuple(among)
    if count > len(among):
        silent = sorted(allowed & unreachable.keys())
        more = f"; {fold(silent)} did not answer" if silent else ""
        raise UsageError(
            f"--nodes {count}: {ran}{more}; it resumes on these nodes or fewer",
            hint=session.again(command="resume", nodes=str(len(among)), words=(run.id,)),
        )
    return tuple(among[:count])


def _warn_fewer(
    session: Session,
    run: Run,
    members: Sequence[Node],
    before: int,
    plans: Sequence[Plan],
    unreachable: Mapping[str, str],
) -> None:
    """Warn about what changes, and where processes of the run may be left."""
    size, was = world_size(plans[: len(members)]), int(run.head.number("world_size") or 0)
    ranks = ", ".join(f"{node.name} is node {rank}" for rank, node in enumerate(members[:8]))
    text = f"run {run.id} resumes on {len(members)} of {before} nodes: {ranks}; world size {size}"
    text += f" instead of {was}" if was and was != size else ""
    session.warn(f"{text}. A global batch that is counted per rank becomes smaller")
    if unreachable:
        session.warn(f"{fold(unreachable)}: no answer, so processes of the run may be left there")


def refuse_resume(
    session: Session, run: Run, unreachable: Mapping[str, str], *, chosen: Sequence[str] | None = None
) -> None:
    """Refuse a run that cannot be resumed; ``chosen`` are the nodes that it continues on, None for all.

    Raises:
        UsageError: it is running, or it has finished.
        NodesFailedError: nodes of it do not answer.
    """
    if run.live:
        live = fold(part.node for part in run.parts if part.live)
        raise UsageError(
            f"run {run.id} is running on {live}",
            hint=f"clusterctl logs -f {run.id}; to restart it from its checkpoint: clusterctl stop {run.id}; then: "
            + session.again(command="resume", words=(run.id,)),
        )
    silent = {
        part.node: "no answer"
        for part in run.parts
        if part.alive is None and part.node in unreachable and (chosen is None or part.node in chosen)
    }
    if silent or (run.missing and chosen is None):
        reasons = {**{name: why for name, why in unreachable.items() if name not in run.nodes}, **silent}
        raise NodesFailedError(
            f"run {run.id} cannot resume without all of its nodes; nothing was started",
            reasons=reasons,
            hint=f"when they are back: {session.again(command='resume', words=(run.id,))}; on the other nodes: "
            + session.again(command="resume", words=(run.id,), exclude=fold(reasons)),
            nothing_done=True,
        )
    if run.state == "finished":
        raise UsageError(
            f"run {run.id} has finished: there is nothing to resume",
            hint=f"clusterctl collect {run.id}",
        )


def with_copies(plans: Sequence[Plan], changed: CopiesOptions, folder: str) -> list[Plan]:
    """The plans with changed options for copies. ``folder``: the run's on the nodes.

    Raises:
        UsageError: there are too few nodes, or a run cannot save to memory.
    """
    if changed == CopiesOptions():
        return list(plans)
    others = len(plans) - 1
    if changed.peers and changed.peers > others:
        raise UsageError(
            f"--copies {changed.peers}: the run has {others} other {'node' if others == 1 else 'nodes'} for copies",
            hint=f"--copies {others}, or more nodes",
        )
    if changed.memory is not None:
        plans = [saving_to(plan, folder, memory=changed.memory) for plan in plans]
    given = {name: value for name, value in vars(changed).items() if value is not None and name != "memory"}
    return [plan._replace(copies=(plan.copies or Copies())._replace(**given)) for plan in plans]


def refuse_plans(plans: Sequence[Plan]) -> None:
    """Refuse a run without instructions to resume in its plans.

    Raises:
        UsageError: the run's checkpoints are not known.
    """
    if plans[0].resume is None:
        raise UsageError(
            f"run {plans[0].run} cannot be resumed: where its program saves checkpoints is not known",
            hint="start the next one with: clusterctl train --output DIR --resume-arg '--resume={checkpoint}' SCRIPT",
        )


def renewed(plans: Sequence[Plan], head: Facts, *, token: str, restarts: int | None = None) -> list[Plan]:
    """The plans with fresh ports and another token for the agents' link, to continue from the newest checkpoint.

    Args:
        plans: the old plans, in the order of their ranks.
        head: rank 0's node now.
        token: hex digits that only the agents of this run know.
        restarts: how often it may restart automatically; None: as before.
    """
    fresh = []
    for plan in plans:
        port = head.port or plan.port
        link = plan.link and plan.link._replace(port=head.link_port or plan.link.port, token=token)
        env = {**plan.env, **({"MASTER_PORT": str(port)} if "MASTER_PORT" in plan.env else {})}
        new = plan._replace(resuming=True, none_ok=False, port=port, link=link, env=env)
        fresh.append(new if restarts is None else new._replace(restarts=restarts))
    return fresh


def _plans(session: Session, run: Run, members: Sequence[Node]) -> list[Plan]:
    """The plan of each node's agent, in the order of the ranks."""
    folder = str(run_folder(session.inventory, run.id))
    positions = {part.node: part.position for part in run.parts}

    def ask(node: Node) -> Plan:
        name = plan_name(positions[node.name])
        result = session.run(node, f"head -c 16777216 -- {quote(folder)}/{name}", deadline=_DEADLINE)
        try:
            return from_json(result.out)
        except UntrustedError as error:
            raise ClusterctlError(result.err.strip() or f"{folder}/{name} {error}") from None

    outcome = session.each(ask, on=members)
    if outcome.failed:
        raise PreflightError(
            f"run {run.id} cannot be read on {len(outcome.failed)} of {len(members)} nodes; nothing was started",
            reasons=outcome.reasons,
            hint=outcome.hint(f"clusterctl status {run.id}"),
        )
    return list(outcome.ok.values())
