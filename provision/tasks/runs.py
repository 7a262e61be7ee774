"""Finds the runs of a cluster with one script per node, and selects one by its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Inventory, Node
from provision.render import render
from provision.run import record
from provision.run.found import NodeRuns, Run, merge_runs, parse_runs
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.session import Session

NEWEST = 100  # runs that a node lists
_LIMIT = 1 << 18  # bytes that are read of a state.json, or of the end of the samples
_DEADLINE = 30.0


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


def script(inventory: Inventory, word: str = "") -> str:
    """The script that lists a node's newest runs; with a word, only runs with the word in their id."""
    return render("run/runs.sh.j2", root=str(inventory.root), word=word, most=NEWEST, limit=_LIMIT)


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
    text = script(session.inventory, word or "")
    names = [node.name for node in session.inventory.nodes]

    def ask(node: Node) -> NodeRuns:
        out = session.run(node, text, deadline=_DEADLINE).out
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


def by_name(inventory: Inventory) -> dict[str, Node]:
    """The inventory's nodes by their names."""
    return {node.name: node for node in inventory.nodes}
