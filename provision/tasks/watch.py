"""``clusterctl monitor``: asks every node of a run again and again, each in its own thread and connection."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.model import Node
from provision.render import render
from provision.run.found import Run
from provision.run.view import SAMPLES, View, Watched
from provision.ssh.remote import reading
from provision.tasks.runs import by_name, find

if TYPE_CHECKING:
    from typing_extensions import Self

    from provision.session import Session

EVERY = 2.0  # seconds between two questions to a node
_LIMIT = 1 << 18  # bytes of a state, of samples, and of log lines in one answer
_HISTORY = 1 << 20  # bytes of events in one answer
_DEADLINE = 15.0  # seconds for an answer


class Watch:
    """The threads that ask. In the ``with`` block, ``view`` returns what is known, and never waits for a node."""

    def __init__(self, session: Session, run: Run, every: float = EVERY) -> None:
        self.session = session
        self.run = run
        self._every = every
        self._watched = Watched(run, [node.name for node in session.inventory.nodes])
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._bug: Exception | None = None
        self.answered = threading.Event()  # set when every node has answered, or is known not to

    def __enter__(self) -> Self:
        _ = self.session.connections  # created in this thread
        nodes = by_name(self.session.inventory)
        for part in self.run.parts:
            if part.node in nodes:
                arguments = (nodes[part.node], part.logs)
                threading.Thread(target=self._ask, args=arguments, name=f"watch-{part.node}", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()

    def view(self) -> View:
        """The run as it is known now. Raises the unexpected exception of a thread."""
        if self._bug is not None:
            raise self._bug
        with self._lock:
            return self._watched.view(time.time())

    def _ask(self, node: Node, logs: str) -> None:
        first = True
        while not self._over.is_set():
            try:
                out = self.session.run(node, self._script(node.name, logs, first=first), deadline=_DEADLINE).out
                with self._lock, reading(node):
                    self._watched.take(node.name, out)
                first = False
            except ClusterctlError as error:
                with self._lock:
                    self._watched.silence(node.name, str(getattr(error, "reason", "") or error))
            except Exception as error:  # noqa: BLE001 - ``view`` raises it in the thread that shows
                self._bug = error
                self.answered.set()
                return
            with self._lock:
                if self._watched.complete:
                    self.answered.set()
            self._over.wait(self._every)

    def _script(self, name: str, logs: str, *, first: bool) -> str:
        with self._lock:
            offsets, reporter = self._watched.offsets(name), self._watched.reporter
        return watch_script(
            str(self.session.inventory.root),
            logs,
            events=offsets.events,
            log=offsets.log,
            samples=SAMPLES if first else 2,
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
