"""``clusterctl resume``: a run that has ended goes on from its newest complete checkpoint, on the same nodes.

The folder of the run is on the nodes already, with its code and its plans; they are read back from there, so that any
machine with the inventory can do it. Only the ports, the agents' token and the number of restarts are new.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, PreflightError, UsageError
from provision.hints import again
from provision.inventory import fold
from provision.launchers import fewer
from provision.model import UNTYPED, CommandLine, Emit, Inventory, Node, Notice
from provision.render import render
from provision.run import plan_name, record, world_size
from provision.run.record import TrainResult
from provision.run.spec import VISIBLE
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import hint, reason
from provision.tasks.begin import Beginning, Following
from provision.tasks.gate import GateOptions, gate
from provision.tasks.prepare import run_folder
from provision.tasks.runs import by_name, find
from provision.tasks.stop import refuse_others
from trainer.contract import Plan, from_json
from trainer.untrusted import UntrustedError

if TYPE_CHECKING:
    from provision.run import Facts
    from provision.run.found import Run
    from provision.ssh.prompts import Prompts

_DEADLINE = 30.0


def resume(
    inventory: Inventory,
    nodes: Sequence[Node],
    word: str | None,
    *,
    options: GateOptions,
    following: Following,
    count: int | None = None,
    restarts: int | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> TrainResult:
    """Go on with a run.

    Args:
        inventory: the cluster.
        nodes: those on which it may continue: fewer than the inventory's mean the run's own among them.
        word: the run; None: the newest.
        options: how strict the gate is; nodes cannot be left out.
        following: how it is followed.
        count: continue on the first so many of the run's nodes; None: on all that ``nodes`` has.
        restarts: how often it may begin again by itself; None: as before.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: no run is meant, it is at work, it has finished, or it cannot be resumed.
        PreflightError: it is another user's, or a node cannot take part.
        NodesFailedError: nodes of it do not answer.
        RunFailedError: it failed; every node was stopped.
        InterruptedByUser: it was stopped.
    """
    with Connections(inventory, prompts) as connections:
        run, found = find(inventory, inventory.nodes, connections, word)
        refuse_others(run, found, others_too=False, typed=inventory.typed)
        chosen = remaining(run, found.unreachable, inventory, nodes, count)
        refuse_resume(run, found.unreachable, inventory.typed, chosen=chosen)
        members = [by_name(inventory)[name] for name in chosen or run.nodes]
        plans = _plans(inventory, run, members, connections)
        before = plans[0].nnodes
        refuse_plans(plans)
        limited = {plan.node: plan.env.get(VISIBLE) for plan in plans}
        visible = {name: str(gpus) for name, gpus in limited.items() if gpus is not None}
        strict = replace(options, exclude_bad=False, visible=visible)
        with gate(inventory, members, connections, run.id, None, strict, emit) as passed:
            head = passed.answers[members[0].name].facts
            if len(members) < before:
                moved = plans[0].node_rank != 0
                facts = {name: answer.facts.interface for name, answer in passed.answers.items()} if moved else {}
                plans = fewer(plans, members[0].train_address, facts)
                _tell_fewer(run, members, before, plans, found.unreachable, emit)
            fresh = renewed(plans, head, token=secrets.token_hex(16), restarts=restarts)
        kept = record.read(record.folder_of(inventory.path, run.id)) or {}
        about = {
            "master": f"{members[0].train_address}:{head.port}",
            "prefix": plans[0].prefix,
            "folder": str(run_folder(inventory, run.id)),
            "launcher": kept.get("launcher"),
            "argv": kept.get("argv"),
        }
        return Beginning(inventory, connections, members, run.id, fresh, about).go(following, emit)


def remaining(
    run: Run, unreachable: Mapping[str, str], inventory: Inventory, nodes: Sequence[Node], count: int | None
) -> tuple[str, ...] | None:
    """The nodes of a run on which it continues, in the order of their ranks; None: the user chose none, so all of them.

    Raises:
        UsageError: none of the run's nodes was chosen, or it has fewer than ``count``.
    """
    if count is None and len(nodes) == len(inventory.nodes):
        return None
    allowed = {node.name for node in nodes}
    among = [name for name in run.nodes if name in allowed]
    ran = f"run {run.id} ran on {fold(run.nodes)}"
    if not among:
        raise UsageError(f"{ran}, and none of these nodes was chosen", hint=f"choose among {fold(run.nodes)}")
    if count is None:
        return tuple(among)
    if count > len(among):
        silent = sorted(allowed & unreachable.keys())
        more = f"; {fold(silent)} did not answer" if silent else ""
        raise UsageError(
            f"--nodes {count}: {ran}{more}; it resumes on these nodes or fewer",
            hint=again(inventory.typed, "resume", nodes=str(len(among)), words=(run.id,)),
        )
    return tuple(among[:count])


def _tell_fewer(
    run: Run,
    members: Sequence[Node],
    before: int,
    plans: Sequence[Plan],
    unreachable: Mapping[str, str],
    emit: Emit,
) -> None:
    """Say what changes, and where something of the run may be left."""
    size, was = world_size(plans), int(run.head.number("world_size") or 0)
    ranks = ", ".join(f"{node.name} is node {rank}" for rank, node in enumerate(members[:8]))
    text = f"run {run.id} resumes on {len(members)} of {before} nodes: {ranks}; world size {size}"
    text += f" instead of {was}" if was and was != size else ""
    emit(Notice(f"{text}. A global batch that is counted per rank becomes smaller", "warning"))
    if unreachable:
        emit(Notice(f"{fold(unreachable)}: no answer, so processes of the run may be left there", "warning"))


def refuse_resume(
    run: Run,
    unreachable: Mapping[str, str],
    typed: CommandLine = UNTYPED,
    *,
    chosen: Sequence[str] | None = None,
) -> None:
    """Refuse a run that cannot be gone on with; ``chosen`` are the nodes that it continues on, None for all.

    Raises:
        UsageError: it is at work, or it has finished.
        NodesFailedError: nodes of it do not answer.
    """
    if run.live:
        at_work = fold(part.node for part in run.parts if part.live)
        raise UsageError(
            f"run {run.id} is at work on {at_work}",
            hint=f"clusterctl logs -f {run.id}; to begin it again from its checkpoint, first: clusterctl stop {run.id}",
        )
    silent = {
        part.node: "no answer"
        for part in run.parts
        if part.alive is None and part.node in unreachable and (chosen is None or part.node in chosen)
    }
    if silent or (run.missing and chosen is None):
        reasons = {**{name: why for name, why in unreachable.items() if name not in run.nodes}, **silent}
        raise NodesFailedError(
            f"run {run.id} cannot go on without all of its nodes; nothing was started",
            reasons=reasons,
            hint=f"when they are back: {again(typed, 'resume', words=(run.id,))}; on the other nodes: "
            + again(typed, "resume", words=(run.id,), exclude=fold(reasons)),
            nothing_done=True,
        )
    if run.state == "finished":
        raise UsageError(
            f"run {run.id} has finished: there is nothing to go on with",
            hint=f"clusterctl collect {run.id}",
        )


def refuse_plans(plans: Sequence[Plan]) -> None:
    """Refuse a run whose plans do not say how to go on.

    Raises:
        UsageError: the run keeps no checkpoints that are known of.
    """
    if plans[0].resume is None:
        raise UsageError(
            f"run {plans[0].run} cannot be resumed: how its program is told to go on is not known",
            hint="start the next one with: clusterctl train --output DIR --resume-arg '--resume={checkpoint}' SCRIPT",
        )


def renewed(plans: Sequence[Plan], head: Facts, *, token: str, restarts: int | None = None) -> list[Plan]:
    """The plans for going on: with fresh ports, another token for the agents' link, from the newest checkpoint.

    Args:
        plans: in the order of their ranks, as they were.
        head: what rank 0's node says about itself now.
        token: hex digits that only the agents of this run know.
        restarts: how often it may begin again by itself; None: as before.
    """
    fresh = []
    for plan in plans:
        port = head.port or plan.port
        link = plan.link and plan.link._replace(port=head.link_port or plan.link.port, token=token)
        env = {**plan.env, **({"MASTER_PORT": str(port)} if "MASTER_PORT" in plan.env else {})}
        new = plan._replace(resuming=True, none_ok=False, port=port, link=link, env=env)
        fresh.append(new if restarts is None else new._replace(restarts=restarts))
    return fresh


def _plans(inventory: Inventory, run: Run, members: Sequence[Node], connections: Connections) -> list[Plan]:
    """What each node's agent was given, in the order of the ranks."""
    folder = str(run_folder(inventory, run.id))
    ranks = {part.node: part.rank for part in run.parts}

    def read(node: Node) -> Plan:
        script = render("run/plan.sh.j2", run=folder, name=plan_name(ranks[node.name]))
        result = connections[node].run(script, deadline=_DEADLINE)
        try:
            return from_json(result.out)
        except UntrustedError as error:
            raise ClusterctlError(result.err.strip() or f"{folder}/{plan_name(ranks[node.name])} {error}") from None

    answers = fan_out(members, read)
    bad = {
        node.name: reason(answer, inventory, node)
        for node in members
        if isinstance(answer := answers[node.name], ClusterctlError)
    }
    if bad:
        raise PreflightError(
            f"run {run.id} cannot be read on {len(bad)} of {len(members)} nodes; nothing was started",
            reasons=bad,
            hint=hint(answers.values(), f"clusterctl status {run.id}"),
        )
    return [answer for answer in answers.values() if isinstance(answer, Plan)]
