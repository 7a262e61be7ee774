"""Follows a run's agents: their events become logs on disk, progress and the verdict; the first failure stops all."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from provision.model import Emit, LogLine, Node, Notice, Progress, Remote

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

LAST_LINES = 20  # of a failed node's log, in the error
# What the agent may need beyond its grace to see that every process is gone (trainer/agent/supervise.py: STUBBORN).
PATIENCE = 45.0


class Follower:
    """What is known of a run while it goes on. One thread a node calls ``follow``."""

    def __init__(self, run: str, nodes: Sequence[Node], folder: Path, *, grace: float, emit: Emit) -> None:
        self.run = run
        self.folder = folder
        self.failures: dict[str, str] = {}
        self.states: dict[str, str] = {node.name: "not started" for node in nodes}
        self.losses: list[float] = []
        self.steps: int | None = None
        self._emit = emit
        self._grace = grace
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ended = {node.name: threading.Event() for node in nodes}
        self._tails: dict[str, dict[int | None, deque[str]]] = {node.name: {} for node in nodes}
        self._files: dict[Path, TextIO] = {}

    @property
    def state(self) -> str:
        """The run as a whole: ``finished``, ``failed`` or ``stopped``."""
        if self.failures:
            return "failed"
        return "finished" if all(state == "finished" for state in self.states.values()) else "stopped"

    def follow(self, node: Node, remote: Remote, script: str) -> None:
        """Run the agent on a node until it ends; its stdin stays open until the run is to stop."""
        exit_event: dict[str, Any] = {}
        self.states[node.name] = "running"

        def line(text: str) -> None:
            event = _parsed(text)
            if event.get("event") == "exit":
                exit_event.update(event)
            else:
                self._take(node, event)

        try:
            result = remote.run(script, stdin=self._held_open(), on_line=line)
            self._judge(node, exit_event, result.err)
        finally:
            # However this node ended, the others cannot go on without it unless it finished.
            if self.states[node.name] != "finished":
                self._stop.set()
            self._ended[node.name].set()

    def lost(self, name: str, reason: str) -> None:
        """A node whose connection broke."""
        self.states[name] = "lost"
        self.failures.setdefault(name, reason)

    def stop_and_wait(self) -> list[str]:
        """Tell every node to stop, wait until each has; returns those that have not answered."""
        self._stop.set()
        return [name for name, ended in self._ended.items() if not ended.wait(self._grace + PATIENCE)]

    def close(self) -> None:
        """Let go of the nodes and close the log files."""
        self._stop.set()
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _held_open(self) -> Iterator[bytes]:
        """An agent's stdin: no bytes, and an end when the run is to stop."""
        self._stop.wait()
        yield from ()

    def _take(self, node: Node, event: dict[str, Any]) -> None:
        match event.get("event"):
            case "log":
                rank = event.get("rank")
                text = str(event.get("line", ""))
                self._write(node, rank, text)
                self._tails[node.name].setdefault(rank, deque(maxlen=LAST_LINES)).append(text)
                if rank == 0:
                    self._emit(LogLine(node.name, rank, text))
            case "progress":
                self._progress(event)
            case "notice":
                self._emit(Notice(f"{node.name}: {event.get('text')}", "warning"))
            case "dropped":
                text = f"{node.name}: {event.get('lines')} log lines came too fast and are only on the node"
                self._emit(Notice(text, "warning"))

    def _progress(self, event: dict[str, Any]) -> None:
        loss = event.get("loss")
        if isinstance(loss, int | float):
            self.losses.append(float(loss))
        self.steps = int(event["step"])
        note = f"loss {loss:.4g}" if isinstance(loss, int | float) else ""
        self._emit(Progress("train", self.steps, event.get("total"), note))

    def _judge(self, node: Node, event: dict[str, Any], stderr: str) -> None:
        name = node.name
        left = event.get("left")
        if left:
            self._emit(Notice(f"{name}: processes that nothing could end: {left}", "warning"))
        if event.get("rc") == 0:
            self.states[name] = "finished"
        elif event.get("stopped"):
            self.states[name] = "stopped"
        else:
            self.states[name] = "failed"
            if not event:
                how = "the agent ended without a word: " + (stderr.strip() or "no message")
            elif event.get("error"):
                how = str(event["error"])
            elif event.get("signal"):
                how = f"ended by {event['signal']}"
            else:
                how = f"ended with exit code {event.get('rc')}"
            with self._lock:
                self.failures[name] = "\n".join([how, *self._last_words(name)])

    def _last_words(self, name: str) -> Iterable[str]:
        """The last lines of the rank that tells most: one with an error, else any, else the launcher's."""
        tails = self._tails[name]
        ranks = [tail for rank, tail in sorted(tails.items(), key=lambda item: item[0] or 0) if rank is not None]
        with_error = [tail for tail in ranks if any("Error" in line for line in tail)]
        return next(iter([*with_error, *ranks, *tails.values()]), ())

    def _write(self, node: Node, rank: int | None, text: str) -> None:
        name = "launcher.log" if rank is None else f"rank{rank}.log"
        path = self.folder / node.name / name
        with self._lock:
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = path.open("a", encoding="utf-8", errors="surrogateescape")
            self._files[path].write(text + "\n")
            self._files[path].flush()


def _parsed(text: str) -> dict[str, Any]:
    """An agent's line as an event; anything else on its stdout is a line of the launcher's log."""
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"event": "log", "rank": None, "line": text}
