"""Reads the events of a rehearsal's agents on all nodes, each node in its own thread."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError
from provision.model import Node
from provision.rehearsal.judging import Seen
from provision.render import render
from provision.run import fields
from provision.tasks.collect import Collection
from provision.tasks.node_threads import NodeThreads
from provision.tasks.runs import find_all

if TYPE_CHECKING:
    from provision.session import Session

EVERY = 1.0  # seconds between two questions to a node
MOST = 200_000  # events of all nodes; a rehearsal takes minutes
_DEADLINE = 10.0
_LIMIT = 1 << 20  # bytes of events in one answer
_ENDS = re.compile(r"^ends ([0-9]{1,18})$", re.MULTILINE)
_TIME = re.compile(r"[0-9]{1,11}(\.[0-9]{1,9})?")
_KINDS = ("progress", "attempt", "end", "hang", "straggler", "notice", "exit", "peer", "phase", "started")


class Events(NodeThreads):
    """The events, with times of this machine's clock. In the ``with`` block, threads read them.

    Args:
        session: has the connections.
        nodes: in the order of their ranks.
        logs: by node name, the folder of its logs below ``<root>/runs``.
    """

    def __init__(self, session: Session, nodes: Sequence[Node], logs: Mapping[str, str]) -> None:
        super().__init__(session, nodes, EVERY)
        self._logs = dict(logs)
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._offsets = {node.name: 0 for node in nodes}  # the next byte of the events
        self._clocks: dict[str, float] = {}  # by node, seconds that its clock is ahead of this machine's
        self._outputs: dict[str, str] = {}
        self._paused = threading.Event()
        self._news = threading.Event()

    def seen(self) -> list[Seen]:
        """All events so far. Raises the unexpected exception of a thread."""
        self.check()
        with self._lock:
            return list(self._seen)

    def wait(self, seconds: float) -> None:
        """Wait for new events."""
        self._news.wait(seconds)
        self._news.clear()

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._paused.set()

    def resume(self) -> None:
        """Read again."""
        self._paused.clear()

    def ended(self, names: Sequence[str]) -> bool:
        """Whether the newest attempt has ended on all nodes."""
        return all(self._end(name) is not None for name in names)

    def finished(self, names: Sequence[str]) -> bool:
        """Whether the job reached its own end."""
        ends = [self._end(name) for name in names]
        return all(end is not None and end.event.get("state") == "finished" for end in ends)

    def reasons(self) -> dict[str, str]:
        """By node name, why the run failed."""
        found = {}
        for node in self._nodes:
            end = self._end(node.name)
            why = end.event.get("why") if end else None
            if isinstance(why, Mapping):
                found[str(why.get("node") or node.name)] = str(why.get("text"))
        return found

    def here(self, name: str, text: str) -> float:
        """A time of a node's clock as one of this machine's; now, if it is none."""
        if not _TIME.fullmatch(text.strip()):
            return time.time()
        with self._lock:
            return float(text) - self._clocks.get(name, 0.0)

    def output(self, name: str) -> str | None:
        """The folder of the checkpoints on a node; None if it is not known yet."""
        return self._outputs.get(name)

    def checkpoints(self, run: str) -> tuple[str, ...]:
        """The names of the checkpoints of rank 0's node, without those that were moved aside."""
        try:
            found = find_all(self.session, on=self._nodes, word=run).runs.get(run)
            if found is None:
                return ()
            answers = Collection(self.session, found, self.session.inventory.path.parent, {}).offers()
        except ClusterctlError:  # a node does not answer: the caller asks again
            return ()
        self._outputs.update({name: answer["output"] for name, answer in answers.items() if answer["output"]})
        head = answers.get(self._nodes[0].name)
        offered = (head or {}).get("offer") or {}
        return tuple(str(each["name"]) for each in offered.get("checkpoints", ()))

    # --- threads -----------------------------------------------------------------------------------

    def ask(self, node: Node) -> None:
        """Take the new events of a node."""
        if self._paused.is_set():
            return
        script = render(
            "rehearse/events.sh.j2",
            root=self.session.inventory.root,
            logs=self._logs[node.name],
            first=self._offsets[node.name],
            limit=_LIMIT,
        )
        asked = time.time()
        out = self.session.run(node, script, deadline=_DEADLINE).out
        answered = time.time()
        if self._paused.is_set():
            return
        clock, _, rest = out.partition("\n")
        found = [one for line in rest.splitlines() if (one := _event(line)) is not None]
        ends = _ENDS.search(rest)
        with self._lock:
            if _TIME.fullmatch(clock.strip()):
                self._clocks[node.name] = float(clock) - (asked + answered) / 2
            ahead = self._clocks.get(node.name, 0.0)
            for at, event in found[: MOST - len(self._seen)]:
                self._seen.append(Seen(at - ahead, node.name, event))
            if ends is not None:
                self._offsets[node.name] = int(ends[1])
        if found:
            self._news.set()

    def silence(self, node: Node, reason: str) -> None:
        """A node that does not answer is expected here: its events are read when it answers again."""

    def _end(self, name: str) -> Seen | None:
        with self._lock:
            mine = [each for each in self._seen if each.node == name and each.kind in ("attempt", "end", "started")]
        return mine[-1] if mine and mine[-1].kind == "end" else None


def _event(line: str) -> tuple[float, dict[str, Any]] | None:
    """A line of the events, with its time; None for another line."""
    if not line.startswith('{"event": "'):
        return None
    event = fields.read(line)
    at = None if event is None else event.get("time")
    if event is None or event.get("event") not in _KINDS or not isinstance(at, int | float):
        return None
    return float(at), event
