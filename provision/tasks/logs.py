"""``clusterctl logs``: a run's logs from its nodes, merged, and new lines while it runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Node
from provision.render import quote, render
from provision.run.follow import Entry, entry, merged, pattern
from provision.session.streams import Stream, Streams
from provision.ssh.remote import reading, sent_length
from provision.tasks.runs import Runs, by_name, find, run_folder

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.session import Session

_DEADLINE = 120.0


@dataclass(frozen=True)
class Logs:
    """The lines of the nodes.

    Attributes:
        run: the run's id.
        state: the run's.
        lines: of all nodes asked, in the order of their times.
        unreachable: nodes without their logs, each with the reason.
        cut: there are more lines than requested.
    """

    run: str
    state: str
    lines: tuple[Entry, ...]
    unreachable: Mapping[str, str]
    cut: bool = False


@dataclass(frozen=True)
class Wanted:
    """Which lines: of one node, of one rank, the last ones. None: all."""

    node: str | None = None
    rank: int | None = None
    last: int | None = None


def logs(
    session: Session,
    word: str | None,
    wanted: Wanted,
    *,
    show: Callable[[Logs], None],
    each: Callable[[Entry], None] | None = None,
) -> str:
    """Show a run's logs, and with ``each`` follow them until the run ends.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        wanted: which lines.
        show: receives the existing lines.
        each: receives every later line, from any thread but never two at once.

    Returns:
        The run's state at the end.

    Raises:
        UsageError: no run matches, or it did not run on that node or with that rank.
        NodesFailedError: no node answered, or no node with the logs.
    """
    run, found = find(session, word)
    parts = _parts(run, wanted, found.unreachable)
    offsets, past = _past(session, run, parts, wanted)
    show(replace(past, unreachable={**_silent(run, wanted, found), **past.unreachable}))
    if each is None or not run.live:
        return run.state
    _follow(session, run, [part for part in parts if part.live], offsets, wanted, each)
    return find(session, run.id)[0].state


def _parts(run: Run, wanted: Wanted, unreachable: Mapping[str, str]) -> list[Part]:
    """The wanted parts. The first node in ``seen_on`` is the one to read the logs from."""
    parts = [part for part in run.parts if wanted.node in {None, part.node}]
    if not parts and wanted.node not in unreachable:
        raise UsageError(f"run {run.id} did not run on {wanted.node}", hint=f"it ran on {fold(run.nodes)}")
    ranks = int(run.head.number("world_size") or 0)
    if wanted.rank is not None and ranks and wanted.rank >= ranks:
        raise UsageError(f"run {run.id} has no rank {wanted.rank}", hint=f"its ranks are 0 to {ranks - 1}")
    return [_own_first(part) for part in parts if part.seen_on]


def _own_first(part: Part) -> Part:
    return replace(part, seen_on=tuple(sorted(part.seen_on, key=lambda name: name != part.node)))


def _silent(run: Run, wanted: Wanted, found: Runs) -> dict[str, str]:
    """Nodes that did not answer and may have logs of the run."""
    known = {part.node for part in run.parts if part.seen_on}
    silent = found.silent(run)
    return {name: why for name, why in silent.items() if name not in known and wanted.node in {None, name}}


def _past(session: Session, run: Run, parts: Sequence[Part], wanted: Wanted) -> tuple[dict[str, int], Logs]:
    """Where each node's log ends now, and the lines before that."""
    nodes = by_name(session.inventory)
    readers = {part.node: nodes[part.seen_on[0]] for part in parts}
    limit = None if wanted.last is None else wanted.last + 1
    scripts = {
        part.node: render(
            "run/logs.sh.j2",
            logs=f"{run_folder(session.inventory, run.id).parent}/{part.logs}",
            pattern=pattern(wanted.rank),
            lines=limit,
        )
        for part in parts
    }

    def ask(node: Node) -> tuple[int, list[Entry]]:
        result = session.run(readers[node.name], scripts[node.name], deadline=_DEADLINE)
        head, _, text = result.out.partition("\n")
        with reading(node):
            lines = [entry(node.name, line) for line in text.split("\n") if line]
            at = re.fullmatch(r"at ([0-9]{1,18})", head)
            return int(at[1]) if at else 0, lines

    outcome = session.each(ask, on=[nodes[part.node] for part in parts])
    if outcome.failed and not outcome.ok:
        raise NodesFailedError(
            f"no answer from {fold(outcome.failed)}",
            reasons=outcome.reasons,
            hint="are these nodes up? clusterctl status",
        )
    together = merged([lines for _, lines in outcome.ok.values()])
    cut = wanted.last is not None and len(together) > wanted.last
    kept = together[len(together) - wanted.last :] if cut and wanted.last is not None else together
    offsets = {name: offset for name, (offset, _) in outcome.ok.items()}
    return offsets, Logs(run.id, run.state, tuple(kept), outcome.reasons, cut)


def tail_script(logs: str, pid: int, first: int) -> str:
    """Sh that prints a node's log from a byte on, until the agent that owns the run exits."""
    return f"cd -- {quote(logs)} || exit 4\nexec tail --pid={pid} -c +{first} -f run.log\n"


def _follow(
    session: Session,
    run: Run,
    parts: Sequence[Part],
    offsets: Mapping[str, int],
    wanted: Wanted,
    each: Callable[[Entry], None],
) -> None:
    nodes = by_name(session.inventory)
    lock = threading.Lock()

    def stream(part: Part) -> Stream:
        at = offsets.get(part.node, 0)

        def script() -> str:
            folder = f"{run_folder(session.inventory, run.id).parent}/{part.logs}"
            return tail_script(folder, int(part.number("pid") or 0), at + 1)

        def line(text: str) -> bool:
            nonlocal at
            at += sent_length(text)
            found = entry(part.node, text)
            if wanted.rank in {None, found.rank}:
                with lock:
                    each(found)
            return False

        return Stream(nodes[part.node], session.connections, script, line, ends=True)

    streams = Streams([stream(part) for part in parts], session.emit)
    streams.start()
    try:
        while not all(each_one.over.wait(1.0) for each_one in streams.streams):
            streams.check()
        streams.check()
    finally:
        streams.close()
