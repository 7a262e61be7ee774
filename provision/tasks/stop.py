"""``clusterctl stop``: stops a run on all its nodes, and verifies that no process, port or GPU memory of it is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from provision.errors import NodesFailedError, PreflightError
from provision.inventory import fold
from provision.model import Node
from provision.render import render
from provision.run import fields, plan_name, record
from provision.tasks.runs import Runs, by_name, find, run_folder

if TYPE_CHECKING:
    from provision.run.found import Run
    from provision.session import Outcome, Session

# Seconds for an agent to end its processes (with the grace, and time for those that hang in the kernel) and verify it.
PATIENCE = 180.0
SAVING = 1800.0  # the same if the run saves first


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped.

    Attributes:
        run: its id.
        nodes: the nodes where it was stopped or had ended before.
        already: its earlier state, if no part of it was running.
        port: the port that is free again; None if unknown.
        saved: the step of the saved checkpoint; None if none was saved.
        step: the last reported step.
        failed: by node name, what could not be ended or proved.
        hint: what to do about that.
        asked_to_save: the run was asked to save a checkpoint.
        resumable: its checkpoints are known, so ``resume`` can continue it.
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
        """Raise one error for all nodes on which the run may still be running.

        Raises:
            NodesFailedError: there are some.
        """
        if self.failed:
            raise NodesFailedError(
                f"run {self.run} may still be running on {len(self.failed)} of "
                f"{len({*self.nodes, *self.failed})} nodes",
                reasons=self.failed,
                hint=self.hint,
            )


def stop(
    session: Session,
    word: str | None,
    *,
    save: bool = False,
    others_too: bool = False,
    ask: Callable[[Sequence[Run]], Run] | None = None,
) -> Stopped:
    """Stop a run on all its nodes.

    Args:
        session: the command's session.
        word: the run; None: the only one that is running.
        save: let it save a checkpoint first.
        others_too: accept another user's run, which only root may stop.
        ask: chooses among running runs if no word was given; None without a terminal.

    Raises:
        UsageError: no run matches, or several do.
        PreflightError: the run is another user's.
        NodesFailedError: no node answered.
    """
    run, found = find(session, word, live_first=True, ask=ask)
    refuse_others(session, run, found, others_too=others_too)
    nodes = [node for part in run.parts if (node := by_name(session.inventory).get(part.node))]
    already = run.state if run.ended else ""
    number = run.head.number("port")
    port = int(number) if number and not already else None  # another program may use an ended run's port by now
    proofs = stop_on(session, run.id, nodes, {part.node: part.rank for part in run.parts}, port=port, save=save)
    done = replace(judged(session, run.id, proofs, port=port, already=already), resumable=run.resumable)
    done = replace(done, asked_to_save=save)
    silent = {name: why for name, why in found.unreachable.items() if run.missing and name not in run.nodes}
    return _with_silent(done, silent) if silent and not already else done


def stop_on(
    session: Session,
    run: str,
    nodes: Sequence[Node],
    ranks: Mapping[str, int],
    *,
    port: int | None = None,
    save: bool = False,
) -> Outcome[Proof]:
    """Ask every node's agent at once to stop the run, and to verify that no process of it is left."""
    folder = str(run_folder(session.inventory, run))

    def ask(node: Node) -> Proof:
        rank = ranks[node.name]
        script = render(
            "run/stop.sh.j2",
            run=folder,
            plan=plan_name(rank),
            options=["--who", record.author(), *(["--save"] if save else [])],
            mark=f"CLUSTERCTL_RUN={run}",
            name=f"CLUSTERCTL_NODE={node.name}",
            ports=[port] if port and rank == 0 else [],
        )
        result = session.run(node, script, deadline=SAVING if save else PATIENCE)
        return parse_proof(result.out, result.err)

    return session.work(
        "stop",
        f"Stopping {run}" + (" after it saves" if save else ""),
        ask,
        on=nodes,
        state=lambda answer: "failed" if answer.problem else "stopped",
        wrong=lambda answer: bool(answer.problem),
        limit=max(1, len(nodes)),
        changes=True,
    )


def problems(proofs: Outcome[Proof]) -> dict[str, str]:
    """By node name, what could not be stopped or verified."""
    return proofs.reasons | {name: answer.problem for name, answer in proofs.ok.items() if answer.problem}


def judged(session: Session, run: str, proofs: Outcome[Proof], *, port: int | None, already: str = "") -> Stopped:
    """The result of a stop, from the answers of all nodes."""
    failed = problems(proofs)
    answers = [proof.answer for proof in proofs.ok.values()]
    steps = [each["step"] for each in answers if isinstance(each.get("step"), int)]
    saved = [each["step"] for each in answers if each.get("saved") and isinstance(each.get("step"), int)]
    retry = session.again(command="stop", words=(run,))
    folder = record.folder_of(session.inventory.path, run)
    if not failed and not already and (record.read(folder) or {}).get("state") == "running":
        record.change(folder, state="stopped")
    return Stopped(
        run=run,
        nodes=tuple(name for name in proofs.ok if name not in failed),
        already=already,
        port=port,
        saved=max(saved, default=None),
        step=max(steps, default=None),
        failed=failed,
        hint=proofs.hint(f"to stop and check it again: {retry}") if failed else "",
    )


def refuse_others(session: Session, run: Run, found: Runs, *, others_too: bool) -> None:
    """Refuse to touch another user's run.

    Raises:
        PreflightError: it is one; the error names the owner.
    """
    reasons = {}
    for part in run.parts:
        uid, me = part.fields.get("uid"), found.users.get(part.node)
        if isinstance(uid, int) and me is not None and uid != me and not (me == 0 and others_too):
            reasons[part.node] = f"it belongs to {part.owner or uid}"
    if reasons:
        forced = session.again("--yes", command="stop", words=(run.id,))
        may = all(found.users.get(name) == 0 for name in reasons)
        raise PreflightError(
            f"run {run.id} is not yours; nothing was changed",
            reasons=reasons,
            hint=f"to stop it anyway, as root: {forced}" if may else f"ask {run.owner}",
        )


def _with_silent(done: Stopped, silent: Mapping[str, str]) -> Stopped:
    failed = {
        **(done.failed or {}),
        **{name: f"no answer; the run may still be running there: {silent[name]}" for name in silent},
    }
    last = f"when {fold(silent)} is back: clusterctl stop {done.run}"
    return replace(done, failed=failed, hint="; ".join(part for part in (done.hint, last) if part))


# --- the proof -------------------------------------------------------------------------------------
# ``templates/run/stop.sh.j2`` prints a node's answer: how the agent ended, and what of the run is left there.

_PROVED = ("processes", "ports", "gpus")


@dataclass(frozen=True)
class Proof:
    """One node after a stop.

    Attributes:
        answer: the agent's answer; empty if it gave none.
        left: what is still running or in use, one sentence each.
        unproved: what could not be inspected, one sentence each.
    """

    answer: Mapping[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """This node's problem; "" if there is none."""
        return "; ".join([*self.left, *self.unproved])


def parse_proof(out: str, err: str = "") -> Proof:
    """Parse a node's answer.

    Args:
        out: the script's output.
        err: its error output, which explains a missing answer of the agent.
    """
    lines = [line.partition(" ")[::2] for line in out.splitlines()]
    answer = next((found for line in out.splitlines() if (found := fields.read(line)) is not None), {})
    left = [text for word, rest in lines if (text := _left(word, rest))]
    left += _left_by_agent(answer) if not left else []
    unproved = [f"nvidia-smi cannot list the GPUs' processes: {rest}" for word, rest in lines if word == "unproved"]
    if answer.get("error"):
        unproved.append(str(answer["error"]))
    elif not answer:
        status = next((rest for word, rest in lines if word == "agent"), "?")
        why = " ".join(err.split()) or f"it ended with status {status}"
        unproved.append(f"the agent did not answer: {why[-300:]}")
    inspected = {rest for word, rest in lines if word == "proved"}
    missing = [name for name in _PROVED if name not in inspected]
    if missing and not unproved:
        unproved.append(f"could not inspect its {', '.join(missing)}")
    return Proof(answer, tuple(left), tuple(unproved))


def _left(word: str, rest: str) -> str:
    """The process, port or GPU that a line reports as still in use; "" if it reports none."""
    first, _, more = rest.partition(" ")
    match word:
        case "left":
            return f"process {first} is still running: {more.strip()[:80] or '?'}"
        case "port":
            return f"port {first} is still in use"
        case "gpu":
            return f"a GPU still holds {more} of process {first}, which has exited"
    return ""


def _left_by_agent(answer: Mapping[str, Any]) -> list[str]:
    found = []
    for key, what in (("left", "processes that could not be killed"), ("gpu", "processes that still hold GPU memory")):
        if pids := answer.get(key):
            found.append(f"{what}: {', '.join(map(str, pids))}")
    return found
