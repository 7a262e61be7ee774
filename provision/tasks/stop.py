"""``clusterctl stop``: a run is stopped on all its nodes, and that nothing of it is left is looked at afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, PreflightError
from provision.hints import again
from provision.inventory import fold
from provision.model import UNTYPED, CommandLine, Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import render
from provision.run import plan_name, record
from provision.run.proof import Proof, proof
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import hint, reason
from provision.tasks.prepare import run_folder
from provision.tasks.runs import Runs, by_name, find

if TYPE_CHECKING:
    from provision.run.found import Run
    from provision.ssh.prompts import Prompts

# Seconds for an agent to end its processes (grace, and what hangs in the kernel) and to prove it; it gives up first.
PATIENCE = 180.0
SAVING = 1800.0  # the same where the work is saved first
_STAGE = "stop"


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped.

    Attributes:
        run: its id.
        nodes: where it was stopped, or had ended already.
        already: its state before, where nothing of it was at work any more.
        port: that is free again; None when it is not known.
        saved: the step whose work was kept; None when none was.
        step: the last step that was told.
        failed: by node name, what could not be ended or proved.
        hint: what to do about that.
        asked_to_save: it was to save its work.
        resumable: where its checkpoints are is known, so that ``resume`` can go on.
    """

    run: str
    nodes: tuple[str, ...]
    already: str = ""
    port: int | None = None
    saved: int | None = None
    step: int | None = None
    failed: Mapping[str, str] | None = None
    hint: str = ""
    asked_to_save: bool = False
    resumable: bool = True

    def raise_failed(self) -> None:
        """Raise one error for all nodes where the run may still be.

        Raises:
            NodesFailedError: there are some.
        """
        if self.failed:
            raise NodesFailedError(
                f"run {self.run} is not proved to be gone on {len(self.failed)} of "
                f"{len({*self.nodes, *self.failed})} nodes",
                reasons=self.failed,
                hint=self.hint,
            )


def stop(
    inventory: Inventory,
    nodes: Sequence[Node],
    word: str | None,
    *,
    save: bool = False,
    others_too: bool = False,
    ask: Callable[[Sequence[Run]], Run] | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Stopped:
    """Stop a run on all its nodes.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        word: the run; None: the only one that is running.
        save: let it save a checkpoint first.
        others_too: also one of another user, which only root may do.
        ask: chooses among running runs where no word was given; None: there is no terminal.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: no run is meant, or several are.
        PreflightError: the run is another user's.
        NodesFailedError: no node answered.
    """
    with Connections(inventory, prompts) as connections:
        run, found = find(inventory, nodes, connections, word, live_first=True, ask=ask)
        refuse_others(run, found, others_too=others_too, typed=inventory.typed)
        done = stop_found(inventory, run, connections, save=save, emit=emit)
        done = replace(done, asked_to_save=save)
        silent = {name: why for name, why in found.unreachable.items() if run.missing and name not in run.nodes}
        if silent and not done.already:
            return _with_silent(done, silent)
        return done


def stop_found(inventory: Inventory, run: Run, connections: Connections, *, save: bool = False, emit: Emit) -> Stopped:
    """Stop a run on the nodes that have told of it; one that has ended is looked at all the same.

    Args:
        inventory: the cluster.
        run: what the nodes told of it.
        connections: to them.
        save: let it save a checkpoint first.
        emit: is told about the progress.
    """
    nodes = [node for part in run.parts if (node := by_name(inventory).get(part.node))]
    ranks = {part.node: part.rank for part in run.parts}
    already = run.state if run.ended else ""
    said = run.head.number("port")
    port = int(said) if said and not already else None  # of an ended run it may be somebody else's by now
    proofs = stop_on(inventory, run.id, nodes, ranks, connections, port=port, save=save, emit=emit)
    done = judged(inventory, run.id, nodes, proofs, port=port, already=already)
    return replace(done, resumable=run.resumable)


def stop_on(
    inventory: Inventory,
    run: str,
    nodes: Sequence[Node],
    ranks: Mapping[str, int],
    connections: Connections,
    *,
    port: int | None = None,
    save: bool = False,
    emit: Emit,
) -> dict[str, Proof | ClusterctlError]:
    """Ask every node's agent to stop the run, all at once, and look at what is left there."""
    began = time.monotonic()
    emit(StageStarted(_STAGE, f"Stopping {run}" + (", which saves first" if save else ""), len(nodes)))
    folder = str(run_folder(inventory, run))
    deadline = SAVING if save else PATIENCE

    def ask(node: Node) -> Proof:
        rank = ranks[node.name]
        options = ["--who", record.author(), *(["--save"] if save else [])]
        script = render(
            "run/stop.sh.j2",
            run=folder,
            plan=plan_name(rank),
            options=options,
            mark=f"CLUSTERCTL_RUN={run}",
            name=f"CLUSTERCTL_NODE={node.name}",
            ports=[port] if port and rank == 0 else [],
        )
        result = connections[node].run(script, deadline=deadline)
        return proof(result.out, result.err)

    answers = fan_out(nodes, ask, limit=max(1, len(nodes)))
    states = {name: _state(answer) for name, answer in answers.items()}
    emit(StageFinished(_STAGE, time.monotonic() - began, states))
    return answers


def judged(
    inventory: Inventory,
    run: str,
    nodes: Sequence[Node],
    proofs: Mapping[str, Proof | ClusterctlError],
    *,
    port: int | None,
    already: str = "",
) -> Stopped:
    """What became of a stop, from the answers of all nodes."""
    failed = {}
    for node in nodes:
        answer = proofs[node.name]
        problem = reason(answer, inventory, node) if isinstance(answer, ClusterctlError) else answer.problem
        if problem:
            failed[node.name] = problem
    said = [answer.said for answer in proofs.values() if isinstance(answer, Proof)]
    steps = [each["step"] for each in said if isinstance(each.get("step"), int)]
    saved = [each["step"] for each in said if each.get("saved") and isinstance(each.get("step"), int)]
    retry = again(inventory.typed, "stop", words=(run,))
    folder = record.folder_of(inventory.path, run)
    if not failed and not already and (record.read(folder) or {}).get("state") == "running":
        record.change(folder, state="stopped")
    return Stopped(
        run=run,
        nodes=tuple(node.name for node in nodes if node.name not in failed),
        already=already,
        port=port,
        saved=max(saved, default=None),
        step=max(steps, default=None),
        failed=failed,
        hint=hint(proofs.values(), f"to try it again, and to look again: {retry}") if failed else "",
    )


def refuse_others(run: Run, found: Runs, *, others_too: bool, typed: CommandLine = UNTYPED) -> None:
    """Refuse to touch a run of another user.

    Raises:
        PreflightError: it is one; the error names the owner.
    """
    reasons = {}
    for part in run.parts:
        uid, me = part.said.get("uid"), found.users.get(part.node)
        if isinstance(uid, int) and me is not None and uid != me and not (me == 0 and others_too):
            reasons[part.node] = f"it is {part.owner or uid}'s"
    if reasons:
        forced = again(typed, "stop", "--yes", words=(run.id,))
        may = all(found.users.get(name) == 0 for name in reasons)
        raise PreflightError(
            f"run {run.id} is not yours; nothing was changed",
            reasons=reasons,
            hint=f"to stop it all the same, as root: {forced}" if may else f"ask {run.owner}",
        )


def _with_silent(done: Stopped, silent: Mapping[str, str]) -> Stopped:
    failed = {
        **(done.failed or {}),
        **{name: f"no answer, and the run may be there: {silent[name]}" for name in silent},
    }
    last = f"when {fold(silent)} is back: clusterctl stop {done.run}"
    return replace(done, failed=failed, hint="; ".join(part for part in (done.hint, last) if part))


def _state(answer: Proof | ClusterctlError) -> str:
    if isinstance(answer, ClusterctlError):
        return "no answer"
    return "failed" if answer.problem else "stopped"
