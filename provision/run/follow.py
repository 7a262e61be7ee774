"""Tracks a run from the events of its agents: writes logs on this machine, shows progress, and gives the outcome.

It never connects to a node: ``tasks/start.py`` brings the events. A run is over when every node's agent has sent
``end``, or can no longer send it because the agent exited or its node cannot be reached.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from provision.model import Emit, LogLine, Notice, Progress
from provision.run import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

LAST_LINES = 20  # lines of a failed node's log in the error
NO_RANK = "launcher"
RANKS = 1024  # ranks of one node with a log file each
OPEN = 256  # open log files at most

Event = dict[str, Any]


class Follower:
    """The state of a run, built from its agents' events. Any thread may pass an event.

    ``active``: how many of the nodes start the run; the others are spares. ``members`` are the nodes of the newest
    attempt in the order of their ranks: only their failures count.
    """

    def __init__(
        self, run: str, names: Sequence[str], folder: Path, *, attempts: int = 1, active: int | None = None, emit: Emit
    ) -> None:
        self.run = run
        self.folder = folder
        self.names = tuple(names)
        self.members = self.names[:active]
        self._excluded: set[str] = set()
        self._newest = 0  # attempt
        self.states: dict[str, str] = dict.fromkeys(names, "not started")
        self.losses: list[float] = []
        self.steps: int | None = None
        self.saved: int | None = None  # the step of the checkpoint that a stop saved
        self.hangs: list[str] = []
        self.turned = threading.Event()  # set when a node has started or ended; the waiting thread clears it
        self._lock = threading.RLock()
        self._attempts = attempts
        self._emit = emit
        self._ends: dict[str, Event] = {}
        self.named: Counter[str] = Counter()  # by node, how many failures that ended an attempt named it
        self.replaced: dict[str, str] = {}  # by node, why a spare node has replaced it
        self.spent: dict[str, Any] | None = None  # where the time of the run went, from the lowest rank that saw steps
        self.unheard: dict[str, str] = {}  # by node, why it cannot be reached; the run may still be running there
        self._failed: dict[str, tuple[str, object]] = {}  # by node, the reason and its rank
        self._started: set[str] = set()
        self._why: dict[str, str] = {}  # by node, how an attempt failed there
        self._tails: dict[str, dict[int | None, deque[str]]] = {name: {} for name in names}
        self._files: dict[Path, TextIO] = {}
        self._phase = ""
        self._shown: Progress | None = None
        self._reporter: int | None = None  # the place in ``members`` of the node whose progress counts

    # --- the run's state -------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state of the whole run: ``running`` (also if unknown), ``finished``, ``failed`` or ``stopped``."""
        if not self.over:
            return "running"
        if self._failed:
            return "failed"
        if self.unheard:
            return "running"
        return "finished" if all(self.states[name] == "finished" for name in self.members) else "stopped"

    @property
    def shown(self) -> dict[str, str]:
        """By node, its state at the end of the stage: nodes without which the run continued are no failures."""
        return {name: "out of the run" if name in self.replaced else state for name, state in self.states.items()}

    @property
    def failures(self) -> dict[str, str]:
        """By node, why the run failed there, with the most relevant last lines of its log."""
        known = {**{name: (why, None) for name, why in self.unheard.items()}, **self._failed}
        return {
            name: "\n".join([_with_rank(text, rank), *self._last_words(name, rank)])
            for name, (text, rank) in known.items()
        }

    @property
    def over(self) -> bool:
        """Whether no node will send more events."""
        return all(name in self._ends for name in self.names if name not in self._excluded)

    @property
    def started(self) -> bool:
        """Whether the command has started on every node. Does not wait for nodes that cannot be reached.

        False if it failed on a node: the agents then stop the others, and the caller should wait for the failure.
        """
        return not (self._failed or self._why) and all(
            name in self._started or name in self._ends for name in self.members
        )

    def ended(self, name: str) -> bool:
        """Whether this node will send no more events."""
        return name in self._ends

    # --- events ------------------------------------------------------------------------------------

    def take(self, name: str, event: Event) -> None:
        """Process an event of a node. Ignores unknown events and fields."""
        handler = self._HANDLERS.get(str(event.get("event")))
        with self._lock:
            if name not in self._ends and handler:
                handler(self, name, event)

    def lost(self, name: str, reason: str) -> None:
        """Record that a node can no longer be reached, so the run's state there is unknown."""
        with self._lock:
            if name not in self._ends:
                if name in self.members:
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
            rank = None  # the launcher, or an impossible rank: no node has so many
        self._write(name, rank, text)
        tails.setdefault(rank, deque(maxlen=LAST_LINES)).append(text)
        if rank == 0:
            self._emit(LogLine(name, rank, text))

    def _progress(self, name: str, event: Event) -> None:
        step, total, loss = event.get("step"), event.get("total"), event.get("loss")
        if not isinstance(step, int) and not isinstance(loss, int | float):
            return
        if name not in self.members:
            return
        at = self.members.index(name)
        if self._reporter is not None and at > self._reporter:
            return  # ranks advance together; each node reports if all ranks print
        if at != self._reporter:
            self._reporter = at
            self.losses.clear()
        if isinstance(loss, int | float):
            self.losses.append(float(loss))
        self.steps = step if isinstance(step, int) else self.steps
        note = f"loss {loss:.4g}" if isinstance(loss, int | float) else ""
        self._show(Progress("train", self.steps or 0, total if isinstance(total, int) else None, note))

    def _phased(self, name: str, event: Event) -> None:
        if name == self.members[0]:
            self._phase = str(event.get("phase") or "")
            self._show(self._shown or Progress("train", self.steps or 0))

    def _show(self, progress: Progress) -> None:
        self._shown = progress
        phase = self._phase if self._phase != "training" or not (progress.done or progress.note) else ""
        note = ", ".join(part for part in (progress.note, phase) if part)
        self._emit(Progress(progress.stage, progress.done, progress.total, note))

    def _started_there(self, name: str, _event: Event) -> None:
        self._started.add(name)
        self.states[name] = "running"
        self.turned.set()

    def _attempt(self, name: str, event: Event) -> None:
        number, checkpoint = event.get("attempt", 1), event.get("checkpoint")
        self._why.pop(name, None)
        self._adopt(number, event.get("nodes"))
        if name == self.members[0] and (checkpoint or number != 1):
            of = f" of {self._attempts}" if self._attempts > 1 else ""
            self._emit(Notice(f"attempt {number}{of} " + (f"from {checkpoint}" if checkpoint else "from the start")))

    def _adopt(self, number: object, nodes: object) -> None:
        """Adopt the nodes of a newer attempt. What became of nodes that it does without no longer matters."""
        if not isinstance(number, int) or number <= self._newest or not isinstance(nodes, list):
            return
        members = tuple(name for name in nodes if name in self.names)
        if not members:
            return
        self._newest = number
        self._excluded |= set(self.members) - set(members)
        if members != self.members:
            self.members, self._reporter = members, None
        for name in self._excluded:
            self._failed.pop(name, None)
            self._why.pop(name, None)
            self.unheard.pop(name, None)
        self.turned.set()

    def _exited(self, name: str, event: Event) -> None:
        if left := event.get("left"):
            self._emit(Notice(f"{name}: processes that could not be killed: {left}", "warning"))
        if event.get("rc") != 0 and not event.get("stopped"):
            self._why[name] = how(event)
            self._started.discard(name)
            if self._attempts > 1:
                self._emit(Notice(f"{name}: {how(event)}", "warning"))

    def _notice(self, name: str, event: Event) -> None:
        if event.get("kind") == "restart" and name == self.members[0]:
            self._blame((event.get("why") or {}).get("node"))
        self._emit(Notice(f"{name}: {event.get('text')}", "info" if event.get("level") == "info" else "warning"))

    def _blame(self, node: object) -> None:
        if node in self.names:
            self.named[str(node)] += 1

    def _replaced(self, name: str, event: Event) -> None:
        self._emit(Notice(replacement(event), "warning"))
        node = event.get("node")
        if node in self.names and node != name:
            self.replaced[str(node)] = str(event.get("text") or "the run continued without it")

    def _straggler(self, _: str, event: Event) -> None:
        self._emit(Notice(str(event.get("text")), "warning" if event.get("state") == "slow" else "info"))

    def _dropped(self, name: str, event: Event) -> None:
        text = f"{name}: {event.get('lines')} log lines arrived too fast; they are only in the log on the node"
        self._emit(Notice(text, "warning"))

    def _hung(self, name: str, event: Event) -> None:
        rank = event.get("rank")
        text = f"{name}{'' if rank is None else f', rank {rank}'} hangs: {event.get('text')}"
        self.hangs.append(text)
        self._emit(Notice(text, "warning"))

    def _peer(self, name: str, event: Event) -> None:
        if event.get("state") != "ended":  # the node itself reports its end
            about = f"{event.get('node')}: {event.get('text') or event.get('state')}"
            self._emit(Notice(f"{name} reports {about}", "warning" if event.get("state") != "back" else "info"))

    def _end(self, name: str, event: Event) -> None:
        self._over(name, event)
        self._take_spent()
        if event.get("saved") and isinstance(event.get("step"), int):
            self.saved = event["step"]
        if event.get("state") == "failed" and name in self.members:
            why = event.get("why") or {}
            text = why.get("text") or self._why.get(name) or "failed without reporting a reason"
            self._failed.setdefault(str(why.get("node") or name), (str(text), why.get("rank")))

    def _take_spent(self) -> None:
        order = dict.fromkeys((*self.members, *self.names))  # a lost node that is back has an old account
        ends = [self._ends[name].get("spent") for name in order if name in self._ends]
        known = [spent for spent in ends if isinstance(spent, dict)]
        self.spent = next((spent for spent in known if spent.get("top") is not None), known[0] if known else None)

    def _gone(self, name: str, event: Event) -> None:
        self._over(name, {**event, "state": "lost"})
        reason = "the agent died without reporting: it was killed, or the machine restarted"
        if name in self.members:
            self._failed.setdefault(name, (reason, None))

    def _over(self, name: str, event: Event) -> None:
        self._ends[name] = event
        self.states[name] = str(event.get("state"))
        self.turned.set()

    def _last_words(self, name: str, rank: object) -> Iterable[str]:
        """The last lines of the most relevant rank: one with an error, else the named rank, else any."""
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
        "replaced": _replaced,
        "started": _started_there,
        "straggler": _straggler,
    }


def replacement(event: Mapping[str, Any]) -> str:
    """One sentence about a node that was lost."""
    spare, rank = event.get("spare"), event.get("rank")
    then = f"spare {spare} takes rank {rank}" if spare else "the run continues without it"
    return f"{event.get('node')} lost ({event.get('text')}): {then}"


def _with_rank(text: str, rank: object) -> str:
    return text if rank is None or f"rank {rank}" in text else f"rank {rank}: {text}"


def how(event: Mapping[str, Any]) -> str:
    """One sentence about how an attempt ended on a node."""
    if event.get("error"):
        return str(event["error"])
    if event.get("signal"):
        return f"ended by {event['signal']}"
    return f"ended with exit code {event.get('rc')}"


def parsed(text: str) -> Event:
    """An agent's line as an event. Any other line on its stdout belongs to the launcher's log."""
    event = fields.read(text)
    return event if event is not None else {"event": "log", "rank": None, "line": text[: fields.TEXT]}


# --- the lines of a run's logs on the nodes --------------------------------------------------------
# The agent writes ``run.log``. Each line is ``TIME [RANK] TEXT``, with TIME in UTC and milliseconds. RANK is a number
# or ``launcher`` (``trainer/agent/supervisor/output.py``).

_LINE = re.compile(r"(\S+Z) \[(launcher|[0-9]{1,9})\] ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A line. ``rank`` is None for the launcher, and ``time`` is "" if the line has none."""

    time: str
    node: str
    rank: int | None
    text: str

    @property
    def shown(self) -> str:
        """The line as the user sees it."""
        source = self.node if self.rank is None else f"{self.node}/{self.rank}"
        return f"{self.time} {source} | {self.text}".lstrip()


def entry(node: str, line: str) -> Entry:
    """Parse a line of ``run.log``. A line of another form is kept unchanged."""
    match = _LINE.fullmatch(line)
    if not match:
        return Entry("", node, None, line)
    return Entry(match[1], node, None if match[2] == "launcher" else int(match[2]), match[3])


def pattern(rank: int | None) -> str:
    """The grep pattern for the lines of one rank; None: for all lines."""
    return "" if rank is None else rf"^[^ ]* \[{rank}\] "


def merged(nodes: Iterable[Sequence[Entry]], last: int | None = None) -> list[Entry]:
    """The lines of several nodes in the order of their times; ``last``: only so many from the end.

    A line without a time stays after the line before it. If clocks differ, the lines of the nodes shift accordingly.
    """
    keyed = []
    for number, lines in enumerate(nodes):
        time = ""
        rows = []
        for index, line in enumerate(lines):
            time = max(time, line.time)  # keep a node's order even if its clock was set back
            rows.append((time, number, index, line))
        keyed.append(rows)
    together = [row[3] for row in heapq.merge(*keyed, key=lambda row: row[:3])]
    return together if last is None else together[max(0, len(together) - last) :]
