"""How every command finds a run, ``clusterctl status RUN`` and ``stop``.

Runs are found on the nodes, with one script per node, so any machine with the inventory sees them, no matter who
started them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.errors import NodesFailedError, PreflightError, UsageError
from provision.inventory import fold
from provision.model import Inventory, Node
from provision.render import render
from provision.run import fields, plan_name, record
from provision.run.effective import Judged, judge, observed
from provision.run.found import NodeRuns, Part, Run, merge_runs, parse_runs
from provision.ssh.remote import reading
from trainer.agent.contract.interval import NONE, Failures
from trainer.agent.contract.plan import FROM_MEMORY, LAST_COPIES

if TYPE_CHECKING:
    from provision.session import Outcome, Session

NEWEST = 100  # runs that a node lists
FEWEST = 8
PARTS = 16_384  # parts of runs that all nodes list together: 4 KiB each, and as much memory on the controller
_LIMIT = 1 << 18  # bytes that are read of a state.json, or of the end of the samples
_DEADLINE = 30.0
_RECORDS = 200  # of other runs, whose failures are counted
# Seconds for an agent to end its processes (with the grace, and time for those that hang in the kernel), to move
# checkpoints from RAM to the disk, to copy the last one, and to verify it. An agent with less to do answers earlier.
PATIENCE = 180.0 + FROM_MEMORY + LAST_COPIES
SAVING = 1800.0  # the same if the run saves first
_PROVED = ("processes", "ports", "gpus")  # that a stop inspects on every node


@dataclass(frozen=True)
class Runs:
    """The runs that nodes know.

    Attributes:
        runs: by id, the oldest first.
        unreachable: nodes that did not answer, each with its reason.
        users: by node name, the uid that the inventory logs in as.
    """

    runs: Mapping[str, Run]
    unreachable: Mapping[str, str]
    users: Mapping[str, int | None]

    def silent(self, run: Run) -> dict[str, str]:
        """Nodes that did not answer and may be the run's, each with its reason."""
        return {name: why for name, why in self.unreachable.items() if name in run.nodes or run.missing}


def run_folder(inventory: Inventory, run: str) -> PurePosixPath:
    """A run's folder on the nodes."""
    return inventory.root / "runs" / run


def logs_folder(inventory: Inventory, part: Part) -> str:
    """The folder of a node's logs of a run, on the nodes."""
    return f"{inventory.root}/runs/{part.logs}"


def reader_of(part: Part) -> str:
    """The name of the node from which a part's logs are read: its own, else the first one that has them."""
    return part.node if part.node in part.seen_on or not part.seen_on else part.seen_on[0]


def by_name(inventory: Inventory) -> dict[str, Node]:
    """The inventory's nodes by their names."""
    return {node.name: node for node in inventory.nodes}


def listed_runs(nodes: int) -> int:
    """How many of its newest runs each of so many nodes lists: 100 up to 163 nodes, 16 of 1,000."""
    return min(NEWEST, max(FEWEST, PARTS // max(1, nodes)))


def list_script(inventory: Inventory, word: str = "", most: int = NEWEST) -> str:
    """The script that lists a node's newest runs; with a word, only runs with the word in their id."""
    return render("run/runs.sh.j2", root=str(inventory.root), word=word, most=most, limit=_LIMIT)


def find_all(
    session: Session, *, on: Sequence[Node] | None = None, word: str | None = None, need_answers: bool = True
) -> Runs:
    """Ask nodes for their runs, in one round trip.

    Args:
        session: the command's session.
        on: the nodes; None for the session's.
        word: only runs with this in their id.
        need_answers: raise if no node answered.

    Raises:
        NodesFailedError: no node answered.
    """
    record.close_all(session.inventory.path)
    on = session.nodes if on is None else on
    script = list_script(session.inventory, word or "", listed_runs(len(on)))
    names = [node.name for node in session.inventory.nodes]

    def ask(node: Node) -> NodeRuns:
        out = session.run(node, script, deadline=_DEADLINE).out
        with reading(node):
            return parse_runs(node.name, out, names)

    outcome = session.each(ask, on=on)
    if need_answers and not outcome.ok:
        raise NodesFailedError(
            f"no answer from {'any of ' if len(outcome.failed) > 1 else ''}{fold(outcome.failed)}",
            reasons=outcome.reasons,
            hint=outcome.hint("are these nodes up? clusterctl status"),
            nothing_done=True,
        )
    users = {name: answer.uid for name, answer in outcome.ok.items()}
    return Runs(merge_runs(outcome.ok.values()), outcome.reasons, users)


def find(
    session: Session,
    word: str | None,
    *,
    on: Sequence[Node] | None = None,
    live_first: bool = False,
    ask: Callable[[Sequence[Run]], Run] | None = None,
) -> tuple[Run, Runs]:
    """The run with this id or part of an id; see ``run.record.choose``. None: the newest run.

    Args:
        session: the command's session.
        word: an id, a part of one, or None.
        on: the nodes to ask; None for the session's.
        live_first: prefer the only running one among the runs that match.
        ask: chooses among running runs if no word was given; None without a terminal.

    Raises:
        UsageError: no run matches, or several do; the error lists them.
        NodesFailedError: no node answered.
    """
    found = find_all(session, on=on, word=word)
    if word is not None and not found.runs:
        found = find_all(session, on=on)  # to list the runs that exist
    live = [run for run in found.runs.values() if run.live and (word is None or word in run.id)] if live_first else []
    if word is None and live and ask is not None:
        return ask(live), found
    if word is None and len(live) > 1:
        listed = ", ".join(f"{run.id} on {fold(run.nodes)}" for run in live)
        each = "; ".join(session.again(command="stop", words=(run.id,)) for run in live[:4])
        raise UsageError(f"{len(live)} runs are running: {listed}", hint=f"name one: {each}")
    if len(live) == 1 and word not in found.runs:
        return live[0], found
    try:
        return found.runs[record.choose(word, found.runs)], found
    except UsageError as error:
        if not found.unreachable:
            raise
        silent = f"{fold(found.unreachable)} did not answer, and may have others"
        raise UsageError(str(error), hint="; ".join(part for part in (error.hint, silent) if part)) from None


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment.

    Attributes:
        run: the run.
        unreachable: nodes that did not answer and may be the run's, each with its reason.
        others: the failures of other runs that this machine has recorded.
    """

    run: Run
    unreachable: Mapping[str, str]
    others: Failures = NONE

    @property
    def judged(self) -> Judged | None:
        """Where its time went, and when it should save; None for a run of an older agent."""
        spent = self.run.spent
        nodes = int(self.run.head.number("nnodes") or len(self.run.parts))
        return None if spent is None else judge(self.run.id, spent, nodes, self.others)


def run_status(session: Session, word: str) -> RunStatus:
    """Ask the nodes for one run, in one round trip.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    run, found = find(session, word)
    return RunStatus(run, found.silent(run), other_failures(session, run.id))


def other_failures(session: Session, run: str = "") -> Failures:
    """The failures of the newest runs that this machine has recorded, without one of them."""
    return observed(record.kept(session.inventory.path, newest=_RECORDS), without=run)


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
    used = run.head.number("port")
    port = int(used) if used and not already else None  # another program may use an ended run's port by now
    proofs = stop_on(session, run.id, nodes, {part.node: part.position for part in run.parts}, port=port, save=save)
    done = stop_result(session, run.id, proofs, port=port, already=already)
    done = replace(done, resumable=run.resumable, asked_to_save=save)
    silent = {name: why for name, why in found.unreachable.items() if run.missing and name not in run.nodes}
    return _with_silent(done, silent) if silent and not already else done


def stop_script(
    folder: str, run: str, node: str, rank: int, *, options: Sequence[str] = (), ports: Sequence[int] = ()
) -> str:
    """The script that asks a node's agent to stop a run, and verifies that no process of it is left there."""
    return render(
        "run/stop.sh.j2",
        run=folder,
        plan=plan_name(rank),
        options=["--who", record.author(), *options],
        mark=f"CLUSTERCTL_RUN={run}",
        name=f"CLUSTERCTL_NODE={node}",
        ports=list(ports),
    )


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
        script = stop_script(
            folder, run, node.name, rank, options=["--save"] if save else [], ports=[port] if port and rank == 0 else []
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


def stop_result(session: Session, run: str, proofs: Outcome[Proof], *, port: int | None, already: str = "") -> Stopped:
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


def refuse_others(session: Session, run: Run, found: Runs, *, others_too: bool, command: str = "stop") -> None:
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
        forced = session.again("--yes", command=command, words=(run.id,))
        may = all(found.users.get(name) == 0 for name in reasons)
        raise PreflightError(
            f"run {run.id} is not yours; nothing was changed",
            reasons=reasons,
            hint=f"to {command} it anyway, as root: {forced}" if may else f"ask {run.owner}",
        )


def _with_silent(done: Stopped, silent: Mapping[str, str]) -> Stopped:
    failed = {
        **(done.failed or {}),
        **{name: f"no answer; the run may still be running there: {silent[name]}" for name in silent},
    }
    last = f"when {fold(silent)} is back: clusterctl stop {done.run}"
    return replace(done, failed=failed, hint="; ".join(part for part in (done.hint, last) if part))


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
