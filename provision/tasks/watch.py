"""``clusterctl monitor``: every node of a run sends what is new, each in its own thread and connection.

The agent's ``watch`` runs on the node and prints until the connection ends: a shell for each look would cost ten times
as much. A connection that broke is opened again and continues after the last byte that was taken.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.model import Node
from provision.run.found import Run
from provision.run.view import View, Watched
from provision.ssh.remote import reading
from provision.tasks.node_program import ended, program_script, program_until
from provision.tasks.node_threads import NodeThreads
from provision.tasks.runs import by_name, find

if TYPE_CHECKING:
    from provision.session import Session

EVERY = 2.0  # seconds between two looks at a node
AGAIN = 2.0  # seconds until a connection that ended is opened again
LATE = 15.0  # seconds without a look, besides the time between two, until a node counts as silent
MODULES = ("watch", "processes")
_MOST = 1 << 22  # characters of one look; the program on the node prints less


class Watch(NodeThreads):
    """The threads that read. In the ``with`` block, ``view`` returns what is known, and never waits for a node."""

    def __init__(self, session: Session, run: Run, every: float = EVERY) -> None:
        nodes = by_name(session.inventory)
        self._logs = {part.node: part.logs for part in run.parts if part.node in nodes}
        super().__init__(session, [nodes[name] for name in self._logs], AGAIN)
        self.run = run
        self._every = every
        self._watched = Watched(run, [node.name for node in session.inventory.nodes])
        self._lock = threading.Lock()
        self._waits_for = set(self._logs)
        self._heard = dict.fromkeys(self._logs, time.monotonic())
        self.answered = threading.Event()  # set when every node has answered, or is known not to

    def view(self) -> View:
        """The run as it is known now. Raises the unexpected exception of a thread."""
        self.check()
        now = time.monotonic()
        with self._lock:
            for name, heard in self._heard.items():
                if now - heard > LATE + self._every:
                    self._watched.silence(name, f"no answer for {now - heard:.0f} s")
            return self._watched.view(time.time())

    def ask(self, node: Node) -> None:
        """Take what a node prints, until its program ends."""
        lines: list[str] = []
        size = 0

        def take(line: str) -> None:
            nonlocal size
            lines.append(line)
            size += len(line)
            if size > _MOST:
                raise ClusterctlError(f"it sent more than {_MOST >> 20} MiB at once")
            if line.startswith("tick "):
                with self._lock, reading(node):
                    self._watched.take(node.name, lines)
                    self._heard[node.name] = time.monotonic()
                    self._known(node)
                lines.clear()
                size = 0

        result = self.session.connections[node].run(
            self._script(node.name), stdin=program_until(MODULES, self.over), on_line=take
        )
        self.silence(node, ended(result.err, result.rc))

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
            offsets = self._watched.offsets(name)
        return watch_script(
            str(self.session.inventory.prefix), f"{self.session.inventory.root}/runs", self._logs[name],
            "--every", f"{self._every:g}", "--events", f"{offsets.events}", "--log", f"{offsets.log}",
        )  # fmt: skip


def watch_script(prefix: str, runs: str, logs: str, *options: str) -> str:
    """The script that prints what is new of a part of a run.

    Args:
        prefix: the current release on the node.
        runs: the folder of the runs on the node.
        logs: the part's log folder, relative to it.
        options: of the agent's command ``watch``.
    """
    words = ("watch", *options, runs, logs)
    return program_script((prefix,), MODULES, words, release=f"{runs}/{logs.partition('/')[0]}/release")


def watch(session: Session, word: str | None, every: float = EVERY) -> Watch:
    """Find a run by its id or a part of it; without one, the newest.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    return Watch(session, find(session, word)[0], every)
