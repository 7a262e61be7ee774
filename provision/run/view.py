"""One run at one moment, as a screen shows it: nodes and GPUs, the curve of the training, events and log lines. Pure.

``Watched`` collects the answers of the nodes and returns a frozen ``View``. All of it is bounded, and all texts are
without control characters.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.run import fields
from provision.run.follow import Entry, entry, replacement
from provision.run.found import Part, Run, of_now, pace_of, parse_runs
from provision.run.sampled import Gpu, Process, Traffic, finite, gpus, processes, short, traffic
from trainer.agent.contract.effective import Effective
from trainer.agent.contract.expected import Expected

POINTS = 8192  # of the curve; when they are full, every second one of the older half is dropped
EVENTS = 500
LINES = 2000  # log lines of all nodes
SAMPLES = 30  # of a node: the pace of the run is measured over them
_ENDS = re.compile(r"([0-9]{1,18}) ([0-9]{1,18})")
_PROGRESS = '"event": "progress"'
_STAMP = re.compile(r"T(\d\d:\d\d:\d\d)")


@dataclass(frozen=True)
class NodeView:
    """A node of the run; ``silent`` is why it does not answer, and ``age`` are seconds since its last sample.

    For ``clusterctl top`` a node has no rank and no state, but ``cores`` and ``processes``.
    """

    name: str
    rank: int | None = None
    state: str = ""
    phase: str = ""
    step: float | None = None
    gpus: tuple[Gpu, ...] = ()
    rss: float | None = None
    load: float | None = None
    sent: float | None = None
    received: float | None = None
    disk_free: float | None = None
    age: float | None = None
    silent: str = ""
    traffic: tuple[Traffic, ...] = ()
    memory: float | None = None
    memory_total: float | None = None
    cores: float | None = None
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True)
class Point:
    """A reported step. A loss that is no finite number is NaN; None means that the line had none."""

    step: int
    time: float | None = None
    loss: float | None = None
    lr: float | None = None
    ms: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Happening:
    """An event that a user should see. ``kind`` is restart, checkpoint, hang, warning, phase or end."""

    time: float
    node: str
    kind: str
    text: str


@dataclass(frozen=True)
class View:
    """What the screen shows.

    ``now`` are epoch seconds; ``left`` and ``age`` are seconds; ``missing`` are nodes of the run that did not report.
    ``slow`` is why the run is slow as a whole, and ``expected`` what it is judged by. ``spent`` is where its time went.
    """

    run: str
    now: float
    state: str = ""
    phase: str = ""
    step: float | None = None
    total: float | None = None
    loss: float | None = None
    lr: float | None = None
    tokens: float | None = None
    pace: float | None = None
    left: float | None = None
    age: float | None = None
    attempt: float | None = None
    attempts: float | None = None
    live: bool = False
    missing: int = 0
    why: str = ""
    slow: str = ""
    expected: Expected | None = None
    spent: Effective | None = None
    nodes: tuple[NodeView, ...] = ()
    points: tuple[Point, ...] = ()
    events: tuple[Happening, ...] = ()
    lines: tuple[Entry, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Offsets:
    """How many bytes of a node's files have been read; ``log`` is -1 before the first answer."""

    events: int = 0
    log: int = -1


@dataclass
class _Known:
    """The last answers of a node."""

    part: Part
    samples: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    offsets: Offsets = Offsets()
    time: str = ""  # of its last log line
    silent: str = ""


class Watched:
    """Collects the answers about one run. Not thread-safe: the caller holds a lock."""

    def __init__(self, run: Run, names: Iterable[str]) -> None:
        self.run = run
        self.reporter = run.reporter.node
        self._names = tuple(names)
        self._nodes = {part.node: _Known(part, deque(part.samples, SAMPLES)) for part in run.parts}
        self._points: list[Point] = []
        self._events: deque[Happening] = deque(maxlen=EVENTS)
        self._lines: deque[Entry] = deque(maxlen=LINES)
        self._ranks: set[int] = set()

    def offsets(self, name: str) -> Offsets:
        """Where the next answer of a node continues."""
        return self._nodes[name].offsets

    def silence(self, name: str, reason: str) -> None:
        """Record that a node does not answer."""
        self._nodes[name].silent = short(reason.partition("\n")[0])

    def take(self, name: str, lines: Sequence[str]) -> None:
        """Take a node's answer, the lines of one look of ``trainer/agent/watch.py``. Skips unknown lines."""
        known = self._nodes[name]
        known.silent = ""
        part: list[str] = []
        for line in lines:
            word, _, rest = line.partition(" ")
            match word:
                case "boot" | "part" | "state" | "stat":
                    part.append(line)
                case "sample":
                    newest = known.samples[-1].get("time") if known.samples else None
                    if (sample := fields.read(rest)) is not None and _newer(sample.get("time"), newest):
                        known.samples.append(sample)
                case "event":
                    if (name == self.reporter or _PROGRESS not in rest) and (event := fields.read(rest)) is not None:
                        self._happened(name, event)
                case "log":
                    self._logged(known, entry(name, rest))
                case "tick" if ends := _ENDS.fullmatch(rest):
                    known.offsets = Offsets(int(ends[1]), int(ends[2]))
        if part:
            parts = parse_runs(name, "\n".join(part), self._names).parts
            known.part = next((each for each in parts if (each.run, each.node) == (self.run.id, name)), known.part)

    def _logged(self, known: _Known, found: Entry) -> None:
        if found.rank is not None and len(self._ranks) < fields.RANKS:
            self._ranks.add(found.rank)
        known.time = max(known.time, found.time)  # a line without a time stays behind the line before it
        self._lines.append(replace(found, time=known.time, text=short(found.text)))

    def view(self, now: float) -> View:
        """The run as it is known now."""
        parts = [replace(known.part, samples=tuple(known.samples)) for known in self._all()]
        run = Run(self.run.id, tuple(of_now(parts)))
        reporter, head = run.reporter, run.head
        self.reporter = reporter.node
        last = self._points[-1] if self._points else None
        began, pace = head.number("began"), self._pace() or pace_of(reporter.samples)
        step = last.step if last and run.live else reporter.number("step")
        total = reporter.number("total")
        return View(
            run=short(run.id),
            now=now,
            state=run.state,
            phase=short(str(run.current(head).fields.get("phase") or "")),
            step=step,
            total=total,
            loss=_last(self._points, "loss") if last else reporter.number("loss"),
            lr=_last(self._points, "lr"),
            tokens=_last(self._points, "tokens"),
            pace=pace,
            left=max(0.0, total - step) * pace if run.live and total and step is not None and pace else None,
            age=None if began is None else max(0.0, (now if run.live else head.number("time") or now) - began),
            attempt=head.number("attempt"),
            attempts=head.number("attempts"),
            live=run.live,
            missing=run.missing,
            why=_why(run),
            slow=short(run.slow),
            expected=run.expected,
            spent=run.spent,
            nodes=tuple(_node(known, run.current(known.part), now) for known in self._all()),
            points=tuple(self._points),
            events=tuple(sorted(self._events, key=lambda event: event.time)),
            lines=tuple(sorted(self._lines, key=lambda line: line.time)),
            ranks=tuple(sorted(self._ranks)),
        )

    def _pace(self) -> float | None:
        """Seconds per step over the last points; the agent's samples have a step every ten seconds only."""
        return pace_of([vars(point) for point in self._points[-SAMPLES:]])

    def _all(self) -> list[_Known]:
        return sorted(self._nodes.values(), key=lambda known: (known.part.rank, known.part.node))

    def _happened(self, name: str, event: Mapping[str, Any]) -> None:
        if event.get("event") == "progress":
            if name == self.reporter:
                self._progress(event)
            return
        found = happening(name, event)
        if found is None or not (found.kind in {"hang", "warning", "stack"} or name == self.run.head.node):
            return
        before = self._events[-1].kind if self._events else ""
        if before == "checkpoint" and (found.kind, found.text) == ("phase", "training"):
            return  # the end of a save: with one every minute, it would fill half of the list
        self._events.append(found)

    def _progress(self, event: Mapping[str, Any]) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        loss = math.nan if "loss" in event and event["loss"] is None else finite(event.get("loss"))
        rest = (finite(event.get(key)) for key in ("lr", "ms", "tokens_per_second"))
        point = Point(step, finite(event.get("time")), loss, *rest)
        while self._points and self._points[-1].step > step:  # a resume repeats steps
            self._points.pop()
        if self._points and self._points[-1].step == step:
            before = self._points.pop()
            given = {key: value for key, value in vars(point).items() if value is not None}
            point = replace(before, **given)
        self._points.append(point)
        if len(self._points) > POINTS:
            half = POINTS // 2
            self._points = self._points[:half:2] + self._points[half:]


def happening(node: str, event: Mapping[str, Any]) -> Happening | None:
    """An agent's event as a user sees it; None for other events."""
    kind, text = str(event.get("event")), short(str(event.get("text") or "")) or _copied(event)
    time = finite(event.get("time")) or 0.0
    match kind:
        case "attempt":
            source = event.get("checkpoint")
            number = event.get("attempt", 1)
            text = f"attempt {number} from {short(str(source))}" if source else f"attempt {number} from the start"
            return Happening(time, node, "start" if number == 1 else "restart", text)
        case "hang":
            rank = event.get("rank")
            return Happening(time, node, "hang", text if rank is None else f"rank {rank}: {text}")
        case "phase":
            phase = short(str(event.get("phase") or ""))
            return Happening(time, node, "checkpoint" if "sav" in phase or "checkpoint" in phase else "phase", phase)
        case "notice" | "replaced" | "copied":
            level = "note" if event.get("level") == "info" or kind == "copied" else "warning"
            return Happening(time, node, level, short(replacement(event)) if kind == "replaced" else text)
        case "straggler" | "stack":
            level = "warning" if event.get("state") == "slow" else "note"
            return Happening(time, node, kind if kind == "stack" else level, text)
        case "peer":
            text = short(f"{event.get('node')}: {event.get('text') or event.get('state')}")
            return Happening(time, node, "note" if event.get("state") in {"ended", "back"} else "warning", text)
        case "dropped":
            return Happening(time, node, "warning", f"{event.get('lines')} log lines are only in the log on the node")
        case "exit" if event.get("rc") or event.get("signal") or event.get("error"):
            why = event.get("error") or event.get("signal") or f"exit code {event.get('rc')}"
            return Happening(time, node, "warning", short(f"the command ended: {why}"))
        case "end":
            return Happening(time, node, "end", short(str(event.get("state"))))
    return None


def _copied(event: Mapping[str, Any]) -> str:
    """The text of the event ``copied``; "" for others."""
    if event.get("event") != "copied":
        return ""
    what = event.get("checkpoint") if event.get("step") is None else f"step {event.get('step')}"
    return short(f"{what} is copied to other nodes")


def folded(lines: Sequence[Entry]) -> list[tuple[Entry, int]]:
    """Lines that differ from the one before only in their numbers, as its last one with their count."""
    found: list[tuple[Entry, int]] = []
    keys: tuple[Any, ...] = ()
    for line in lines:
        key = (line.node, line.rank, re.sub(r"[0-9.]+", "0", line.text))
        found[-1:] = [(line, found[-1][1] + 1)] if found and key == keys else [*found[-1:], (line, 1)]
        keys = key
    return found


def time_of(line: Entry) -> str:
    """``01:07:05`` of a line's time; "" if it has none."""
    match = _STAMP.search(line.time)
    return match[1] if match else ""


def _node(known: _Known, part: Part, now: float) -> NodeView:
    sample = known.samples[-1] if known.samples else {}
    time = finite(sample.get("time"))
    return replace(
        node_view(part.node, sample),
        rank=None if part.spare else part.rank,
        state="no answer" if known.silent else part.state,
        phase=short(str(part.fields.get("phase") or "")) if part.live else "",
        step=part.number("step"),
        age=None if time is None else max(0.0, now - time),
        silent=known.silent,
    )


def node_view(name: str, sample: Mapping[str, Any]) -> NodeView:
    """A node as its sample shows it."""
    ports = traffic(sample)
    total, free = (finite(sample.get(key)) for key in ("memory_total", "memory_available"))
    return NodeView(
        short(name),
        gpus=gpus(sample),
        rss=finite(sample.get("rss")),
        load=finite(sample.get("load")),
        disk_free=finite(sample.get("disk_free")),
        cores=finite(sample.get("cores")),
        sent=max((port.sent for port in ports if port.sent is not None), default=None),
        received=max((port.received for port in ports if port.received is not None), default=None),
        traffic=ports,
        memory=None if total is None or free is None else total - free,
        memory_total=total,
        processes=processes(sample),
    )


def _newer(time: Any, than: Any) -> bool:
    return finite(time) is not None and (finite(than) is None or time > than)


def _last(points: Sequence[Point], name: str) -> float | None:
    """The newest value of a field; fields may be in separate lines of a trainer."""
    return next((value for point in reversed(points[-50:]) if (value := getattr(point, name)) is not None), None)


def _why(run: Run) -> str:
    for part in run.parts:
        why = part.fields.get("why")
        if isinstance(why, Mapping) and why.get("text"):
            rank = "" if why.get("rank") is None else f", rank {why['rank']}"
            return short(f"{why.get('node') or part.node}{rank}: {str(why['text']).partition(chr(10))[0]}")
    return ""
