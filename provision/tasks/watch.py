"""``clusterctl monitor``: asks every node of a run again and again, each in its own thread and connection."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from provision.model import Node
from provision.render import render
from provision.run.found import Run
from provision.run.view import SAMPLES, View, Watched
from provision.ssh.remote import reading
from provision.tasks.node_threads import NodeThreads
from provision.tasks.runs import by_name, find

if TYPE_CHECKING:
    from provision.session import Session

EVERY = 2.0  # seconds between two questions to a node
_LIMIT = 1 << 18  # bytes of a state, of samples, and of log lines in one answer
_HISTORY = 1 << 20  # bytes of events in one answer
_DEADLINE = 15.0  # seconds for an answer


class Watch(NodeThreads):
    """The threads that ask. In the ``with`` block, ``view`` returns what is known, and never waits for a node."""

    def __init__(self, session: Session, run: Run, every: float = EVERY) -> None:
        nodes = by_name(session.inventory)
        self._logs = {part.node: part.logs for part in run.parts if part.node in nodes}
        super().__init__(session, [nodes[name] for name in self._logs], every)
        self.run = run
        self._watched = Watched(run, [node.name for node in session.inventory.nodes])
        self._lock = threading.Lock()
        self._waits_for = set(self._logs)
        self.answered = threading.Event()  # set when every node has answered, or is known not to

    def view(self) -> View:
        """The run as it is known now. Raises the unexpected exception of a thread."""
        self.check()
        with self._lock:
            return self._watched.view(time.time())

    def ask(self, node: Node) -> None:
        """Take the next answer of a node."""
        out = self.session.run(node, self._script(node.name), deadline=_DEADLINE).out
        with self._lock, reading(node):
            self._watched.take(node.name, out)
            self._known(node)

    def silence(self, node: Node, reason: str) -> None:
        """Record that a node does not answer."""
        with self._lock:
            self._watched.silence(node.name, reason)
            self._known(node)

    def _known(self, node: Node) -> None:
        self._waits_for.discard(node.name)
        if not self._waits_for:
            self.answered.set()

    def _script(self, name: str) -> str:
        with self._lock:
            offsets, reporter = self._watched.offsets(name), self._watched.reporter
        return watch_script(
            str(self.session.inventory.root),
            self._logs[name],
            events=offsets.events,
            log=offsets.log,
            samples=SAMPLES if offsets.log < 0 else 2,
            progress=name == reporter,
        )


def watch_script(root: str, logs: str, *, events: int, log: int, samples: int, progress: bool) -> str:
    """The script for one answer.

    Args:
        root: clusterctl's folder on the node.
        logs: the part's log folder, relative to ``root/runs``.
        events: the first byte of the events.
        log: the first byte of the log; -1: only its end.
        samples: how many of the last samples.
        progress: with the steps and losses.
    """
    return render(
        "run/watch.sh.j2",
        root=root,
        logs=logs,
        events=events,
        log=log,
        samples=samples,
        skip=["log"] if progress else ["log", "progress"],
        limit=_LIMIT,
        history=_HISTORY,
    )


def watch(session: Session, word: str | None, every: float = EVERY) -> Watch:
    """Find a run by its id or a part of it; without one, the newest.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    return Watch(session, find(session, word)[0], every)
