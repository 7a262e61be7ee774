"""What is known of a run from the events of its agents: logs on this machine's disk, progress, and the verdict.

Nothing here reaches a node: ``tasks/attach.py`` brings the events. A run is over when every node's agent has said
``end``, or cannot say it any more (its agent is gone, or nobody gets through to it).
"""

from __future__ import annotations

import heapq
import re
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from provision.model import Emit, LogLine, Notice, Progress
from provision.run import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

LAST_LINES = 20  # of a failed node's log, in the error
NO_RANK = "launcher"
RANKS = 1024  # of one node that have a log file each
OPEN = 256  # log files that are open at once

Event = dict[str, Any]


class Follower:
    """A run, as its agents tell it. Any thread may give it an event."""

    def __init__(self, run: str, names: Sequence[str], folder: Path, *, attempts: int = 1, emit: Emit) -> None:
        self.run = run
        self.folder = folder
        self.names = tuple(names)
        self.states: dict[str, str] = dict.fromkeys(names, "not started")
        self.losses: list[float] = []
        self.steps: int | None = None
        self.saved: int | None = None  # the step whose work a stop has kept
        self.hangs: list[str] = []
        self.turned = threading.Event()  # set when a node has started or ended; whoever waits clears it
        self._lock = threading.RLock()
        self._attempts = attempts
        self._emit = emit
        self._ends: dict[str, Event] = {}
        self.unheard: dict[str, str] = {}  # by node, why nobody gets through to it; the run may go on there
        self._failed: dict[str, tuple[str, object]] = {}  # by node: why, and the rank that it is about
        self._started: set[str] = set()
        self._why: dict[str, str] = {}  # by node, how an attempt failed there
        self._tails: dict[str, dict[int | None, deque[str]]] = {name: {} for name in names}
        self._files: dict[Path, TextIO] = {}
        self._phase = ""
        self._said: Progress | None = None

    # --- what is known ---------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The run as a whole: ``running``, as far as is known, ``finished``, ``failed`` or ``stopped``."""
        if not self.over:
            return "running"
        if self._failed:
            return "failed"
        if self.unheard:
            return "running"
        return "finished" if all(state == "finished" for state in self.states.values()) else "stopped"

    @property
    def failures(self) -> dict[str, str]:
        """By node, why the run failed there and the last lines that tell most; of the nodes that failed first."""
        known = {**{name: (why, None) for name, why in self.unheard.items()}, **self._failed}
        return {
            name: "\n".join([_with_rank(text, rank), *self._last_words(name, rank)])
            for name, (text, rank) in known.items()
        }

    @property
    def over(self) -> bool:
        """Whether nothing more will come from any node."""
        return all(name in self._ends for name in self.names)

    @property
    def started(self) -> bool:
        """Whether the command runs on every node, or has run there; a node out of reach is not waited for.

        Not where it failed on one: the agents then end it on the others, and the failure is worth waiting for.
        """
        return not (self._failed or self._why) and all(
            name in self._started or name in self._ends for name in self.names
        )

    def ended(self, name: str) -> bool:
        """Whether nothing more will come from this node."""
        return name in self._ends

    # --- what comes --------------------------------------------------------------------------------

    def take(self, name: str, event: Event) -> None:
        """Take in an event of a node. Events and fields that are not known here are left alone."""
        handler = self._HANDLERS.get(str(event.get("event")))
        with self._lock:
            if name not in self._ends and handler:
                handler(self, name, event)

    def lost(self, name: str, reason: str) -> None:
        """Nobody gets through to a node any more, and what became of the run there is not known."""
        with self._lock:
            if name not in self._ends:
                self.unheard[name] = reason
                self._over(name, {"state": "lost"})

    def close(self) -> None:
        """Close the log files."""
        with self._lock:
            while self._files:
                self._files.popitem()[1].close()

    def _log(self, name: str, event: Event) -> None:
        rank = event.get("rank")
        text = str(event.get("line", ""))
        tails = self._tails[name]
        if not isinstance(rank, int) or (rank not in tails and len(tails) >= RANKS):
            rank = None  # the launcher, or a rank that cannot be: no node has so many
        self._write(name, rank, text)
        tails.setdefault(rank, deque(maxlen=LAST_LINES)).append(text)
        if rank == 0:
            self._emit(LogLine(name, rank, text))

    def _progress(self, _name: str, event: Event) -> None:
        step, total, loss = event.get("step"), event.get("total"), event.get("loss")
        if not isinstance(step, int):
            return
        if isinstance(loss, int | float):
            self.losses.append(float(loss))
        self.steps = step
        note = f"loss {loss:.4g}" if isinstance(loss, int | float) else ""
        self._show(Progress("train", step, total if isinstance(total, int) else None, note))

    def _phased(self, name: str, event: Event) -> None:
        if name == self.names[0]:
            self._phase = str(event.get("phase") or "")
            self._show(self._said or Progress("train", self.steps or 0))

    def _show(self, progress: Progress) -> None:
        self._said = progress
        phase = self._phase if self._phase != "training" else ""
        note = ", ".join(part for part in (progress.note, phase) if part)
        self._emit(Progress(progress.stage, progress.done, progress.total, note))

    def _started_there(self, name: str, _event: Event) -> None:
        self._started.add(name)
        self.states[name] = "running"
        self.turned.set()

    def _attempt(self, name: str, event: Event) -> None:
        number, checkpoint = event.get("attempt", 1), event.get("checkpoint")
        self._why.pop(name, None)
        if name == self.names[0] and (checkpoint or number != 1):
            of = f" of {self._attempts}" if self._attempts > 1 else ""
            self._emit(Notice(f"attempt {number}{of} " + (f"from {checkpoint}" if checkpoint else "from the start")))

    def _exited(self, name: str, event: Event) -> None:
        if left := event.get("left"):
            self._emit(Notice(f"{name}: processes that nothing could end: {left}", "warning"))
        if event.get("rc") != 0 and not event.get("stopped"):
            self._why[name] = how(event)
            self._started.discard(name)
            if self._attempts > 1:
                self._emit(Notice(f"{name}: {how(event)}", "warning"))

    def _notice(self, name: str, event: Event) -> None:
        self._emit(Notice(f"{name}: {event.get('text')}", "info" if event.get("level") == "info" else "warning"))

    def _dropped(self, name: str, event: Event) -> None:
        text = f"{name}: {event.get('lines')} log lines came too fast and are only on the node"
        self._emit(Notice(text, "warning"))

    def _hung(self, name: str, event: Event) -> None:
        rank = event.get("rank")
        text = f"{name}{'' if rank is None else f', rank {rank}'} hangs: {event.get('text')}"
        self.hangs.append(text)
        self._emit(Notice(text, "warning"))

    def _peer(self, name: str, event: Event) -> None:
        if event.get("state") != "ended":  # that is said by the node itself
            about = f"{event.get('node')}: {event.get('text') or event.get('state')}"
            self._emit(Notice(f"{name} about {about}", "warning" if event.get("state") != "back" else "info"))

    def _end(self, name: str, event: Event) -> None:
        self._over(name, event)
        if event.get("saved") and isinstance(event.get("step"), int):
            self.saved = event["step"]
        if event.get("state") == "failed":
            why = event.get("why") or {}
            text = why.get("text") or self._why.get(name) or "failed without a word"
            self._failed.setdefault(str(why.get("node") or name), (str(text), why.get("rank")))

    def _gone(self, name: str, event: Event) -> None:
        self._over(name, {**event, "state": "lost"})
        reason = "its agent is gone without a word: it was killed, or the machine was started anew"
        self._failed.setdefault(name, (reason, None))

    def _over(self, name: str, event: Event) -> None:
        self._ends[name] = event
        self.states[name] = str(event.get("state"))
        self.turned.set()

    def _last_words(self, name: str, rank: object) -> Iterable[str]:
        """The last lines of the rank that tells most: one with an error, else the one named, else any."""
        tails = self._tails.get(name, {})
        ranks = [tail for number, tail in sorted(tails.items(), key=lambda item: item[0] or 0) if number is not None]
        named = [tails[rank]] if isinstance(rank, int) and rank in tails else []
        with_error = [tail for tail in [*named, *ranks] if any("Error" in line for line in tail)]
        return next(iter([*with_error, *named, *ranks, *tails.values()]), ())

    def _write(self, name: str, rank: int | None, text: str) -> None:
        path = self.folder / name / (f"{NO_RANK}.log" if rank is None else f"rank{rank}.log")
        if path not in self._files:
            if len(self._files) >= OPEN:
                self._files.pop(next(iter(self._files))).close()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("a", encoding="utf-8", errors="surrogateescape")
        self._files[path].write(text + "\n")
        self._files[path].flush()

    _HANDLERS: Mapping[str, Callable[[Follower, str, Event], None]] = {
        "attempt": _attempt,
        "dropped": _dropped,
        "end": _end,
        "exit": _exited,
        "gone": _gone,
        "hang": _hung,
        "log": _log,
        "notice": _notice,
        "peer": _peer,
        "phase": _phased,
        "progress": _progress,
        "started": _started_there,
    }


def _with_rank(text: str, rank: object) -> str:
    return text if rank is None or f"rank {rank}" in text else f"rank {rank}: {text}"


def how(event: Mapping[str, Any]) -> str:
    """One sentence for how an attempt ended on a node."""
    if event.get("error"):
        return str(event["error"])
    if event.get("signal"):
        return f"ended by {event['signal']}"
    return f"ended with exit code {event.get('rc')}"


def parsed(text: str) -> Event:
    """An agent's line as an event; anything else on its stdout is a line of the launcher's log."""
    event = fields.read(text)
    return event if event is not None else {"event": "log", "rank": None, "line": text[: fields.TEXT]}


# --- the lines of a run's logs on the nodes --------------------------------------------------------
# The agent writes ``run.log``: every line is ``TIME [RANK] TEXT``, TIME in UTC with milliseconds. RANK is a number or
# ``launcher`` (``trainer/agent/supervisor/output.py``).

_LINE = re.compile(r"(\S+Z) \[(launcher|[0-9]{1,9})\] ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A line. ``rank`` is None for the launcher's own, and ``time`` is "" where the line has none."""

    time: str
    node: str
    rank: int | None
    text: str

    @property
    def shown(self) -> str:
        """As people read it."""
        source = self.node if self.rank is None else f"{self.node}/{self.rank}"
        return f"{self.time} {source} | {self.text}".lstrip()


def entry(node: str, line: str) -> Entry:
    """Read a line of ``run.log``; one that is no such line is kept as it is."""
    match = _LINE.fullmatch(line)
    if not match:
        return Entry("", node, None, line)
    return Entry(match[1], node, None if match[2] == "launcher" else int(match[2]), match[3])


def pattern(rank: int | None) -> str:
    """The grep pattern for the lines of one rank; None: for all lines."""
    return "" if rank is None else rf"^[^ ]* \[{rank}\] "


def merged(nodes: Iterable[Sequence[Entry]], last: int | None = None) -> list[Entry]:
    """The lines of several nodes in the order of their times, at most the ``last`` so many.

    A line without a time stays behind the one before it. Clocks that differ shift a node's lines against another's.
    """
    keyed = []
    for number, lines in enumerate(nodes):
        time = ""
        rows = []
        for index, line in enumerate(lines):
            time = max(time, line.time)  # a clock that was set back must not mix up a node's own lines
            rows.append((time, number, index, line))
        keyed.append(rows)
    together = [row[3] for row in heapq.merge(*keyed, key=lambda row: row[:3])]
    return together if last is None else together[max(0, len(together) - last) :]
