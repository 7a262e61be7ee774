"""``clusterctl logs``: the logs of a run from its nodes, as one, and what comes behind them while it runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Emit, Inventory, Node
from provision.render import render
from provision.run.follow import Entry, entry, merged, pattern
from provision.ssh.remote import Connections, fan_out, reading, sent_length
from provision.tasks.answers import reason
from provision.tasks.prepare import run_folder
from provision.tasks.runs import by_name, find
from provision.tasks.streams import Stream, Streams

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.ssh.prompts import Prompts

_DEADLINE = 120.0


@dataclass(frozen=True)
class Logs:
    """What the nodes have.

    Attributes:
        run: the run's id.
        state: the run's.
        lines: of all nodes asked, in the order of their times.
        unreachable: nodes whose logs are missing, each with its reason.
        cut: there are more lines than were asked for.
    """

    run: str
    state: str
    lines: tuple[Entry, ...]
    unreachable: Mapping[str, str]
    cut: bool = False


@dataclass(frozen=True)
class Wanted:
    """Which lines: of one node, of one rank, the last so many. None: all."""

    node: str | None = None
    rank: int | None = None
    last: int | None = None


def logs(
    inventory: Inventory,
    nodes: Sequence[Node],
    word: str | None,
    wanted: Wanted,
    *,
    show: Callable[[Logs], None],
    each: Callable[[Entry], None] | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> str:
    """Show a run's logs, and with ``each`` follow them until the run has ended.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        word: the run; None: the newest.
        wanted: which lines.
        show: is given what there is.
        each: is given every line that comes behind it, from any thread but never two at once.
        prompts: how to ask for a password or about a host key.
        emit: is told about connections that are away.

    Returns:
        The run's state at the end.

    Raises:
        UsageError: no run is meant, or it did not run on that node or with that rank.
        NodesFailedError: no node answered, or none of those that have the logs.
    """
    with Connections(inventory, prompts) as connections:
        run, found = find(inventory, nodes, connections, word)
        parts = _parts(run, wanted, found.unreachable)
        offsets, past = _past(inventory, run, parts, wanted, connections)
        show(replace(past, unreachable={**_silent(run, wanted, found.unreachable), **past.unreachable}))
        if each is None or not run.live:
            return run.state
        _follow(inventory, run, [part for part in parts if part.live], offsets, wanted, connections, each, emit)
        return find(inventory, nodes, connections, run.id)[0].state


def _parts(run: Run, wanted: Wanted, unreachable: Mapping[str, str]) -> list[Part]:
    """The parts that are meant, each with the node that its logs are read from first in ``seen_on``."""
    parts = [part for part in run.parts if wanted.node in {None, part.node}]
    if not parts and wanted.node not in unreachable:
        raise UsageError(f"run {run.id} did not run on {wanted.node}", hint=f"it ran on {fold(run.nodes)}")
    ranks = int(run.head.number("world_size") or 0)
    if wanted.rank is not None and ranks and wanted.rank >= ranks:
        raise UsageError(f"run {run.id} has no rank {wanted.rank}", hint=f"its ranks are 0 to {ranks - 1}")
    return [_own_first(part) for part in parts if part.seen_on]


def _own_first(part: Part) -> Part:
    return replace(part, seen_on=tuple(sorted(part.seen_on, key=lambda name: name != part.node)))


def _silent(run: Run, wanted: Wanted, unreachable: Mapping[str, str]) -> dict[str, str]:
    """Nodes that did not answer and may have logs of the run."""
    known = {part.node for part in run.parts if part.seen_on}
    return {
        name: why
        for name, why in unreachable.items()
        if name not in known and (run.missing or name in run.nodes) and wanted.node in {None, name}
    }


def _past(
    inventory: Inventory, run: Run, parts: Sequence[Part], wanted: Wanted, connections: Connections
) -> tuple[dict[str, int], Logs]:
    nodes = by_name(inventory)
    readers = {part.node: nodes[part.seen_on[0]] for part in parts}
    limit = None if wanted.last is None else wanted.last + 1
    scripts = {
        part.node: render(
            "run/logs.sh.j2",
            logs=f"{run_folder(inventory, run.id).parent}/{part.logs}",
            pattern=pattern(wanted.rank),
            lines=limit,
        )
        for part in parts
    }

    def ask(node: Node) -> tuple[int, list[Entry]]:
        result = connections[readers[node.name]].run(scripts[node.name], deadline=_DEADLINE)
        head, _, text = result.out.partition("\n")
        with reading(node):
            lines = [entry(node.name, line) for line in text.split("\n") if line]
            at = re.fullmatch(r"at ([0-9]{1,18})", head)
            return int(at[1]) if at else 0, lines

    answers = fan_out([nodes[part.node] for part in parts], ask)
    good = {name: answer for name, answer in answers.items() if not isinstance(answer, ClusterctlError)}
    bad = {
        name: reason(answer, inventory, readers[name])
        for name, answer in answers.items()
        if isinstance(answer, ClusterctlError)
    }
    if bad and not good:
        raise NodesFailedError(f"no answer from {fold(bad)}", reasons=bad, hint="are these nodes up? clusterctl status")
    together = merged([lines for _, lines in good.values()])
    cut = wanted.last is not None and len(together) > wanted.last
    kept = together[len(together) - wanted.last :] if cut and wanted.last is not None else together
    return {name: offset for name, (offset, _) in good.items()}, Logs(run.id, run.state, tuple(kept), bad, cut)


def _follow(
    inventory: Inventory,
    run: Run,
    parts: Sequence[Part],
    offsets: Mapping[str, int],
    wanted: Wanted,
    connections: Connections,
    each: Callable[[Entry], None],
    emit: Emit,
) -> None:
    nodes = by_name(inventory)
    lock = threading.Lock()

    def stream(part: Part) -> Stream:
        at = offsets.get(part.node, 0)

        def script() -> str:
            folder = f"{run_folder(inventory, run.id).parent}/{part.logs}"
            return render("run/log_tail.sh.j2", logs=folder, pid=int(part.number("pid") or 0), first=at + 1)

        def line(text: str) -> bool:
            nonlocal at
            at += sent_length(text)
            found = entry(part.node, text)
            if wanted.rank in {None, found.rank}:
                with lock:
                    each(found)
            return False

        return Stream(nodes[part.node], connections, script, line, ends=True)

    streams = Streams([stream(part) for part in parts], emit)
    streams.start()
    try:
        while not all(each_one.over.wait(1.0) for each_one in streams.streams):
            streams.look()
        streams.look()
    finally:
        streams.close()
