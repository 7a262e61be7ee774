"""Turns results into lines of text: sizes, time spans, folded states, errors. Pure; ``output.py`` prints the lines."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import textwrap
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from provision.errors import ClusterctlError, InterruptedByUser, ListedError, NodesError, Reason
from provision.inventory.selection import fold

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from provision.model import Finding, Progress, StageFinished, StageStarted, StepResult

Summary = tuple[Mapping[str, Any], str]  # a finished command's data for --json, and its text
Style = Literal["", "bold", "dim", "green", "yellow", "red"]

SPEED_WINDOW = 30.0  # seconds over which a speed is averaged: steady enough for an ETA, short enough to show a stall

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")  # CSI, OSC, two-character
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_BAD = re.compile(r"(?i)\b(failed|unreachable|refused|error|timed out|lost|no answer)\b")
_ENDS: tuple[Style, Style, Style] = ("green", "yellow", "red")  # of a stage: well, partly, not at all
_GOOD = re.compile(r"(?i)\A(would )?(changed?|deployed|deploy|done|enrolled|pinned|restored)\b")
_VERDICT: Mapping[str, Style] = {"OK": "green", "WARN": "yellow", "FAIL": "red", "UNKNOWN": "yellow", "N/A": "dim"}
_STEP: Mapping[str, Style] = {"changed": "green", "would change": "yellow", "failed": "red"}


class Line(NamedTuple):
    """One line and its style on a terminal. ``hang`` is the indent of wrapped text; ``None`` never wraps."""

    text: str
    style: Style = ""
    hang: int | None = 4


# --- numbers -------------------------------------------------------------------------------------


def size(count: float) -> str:
    """``1234567`` -> ``1.2 MB``: decimal units, as for networks and disks."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 05 s``, ``1 h 02 min``."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def span(seconds: float) -> str:
    """``42 s``, ``8 min``, ``3 h``, ``2 d``: a time span in whole units, where space is short."""
    whole = int(max(seconds, 0))
    for unit, length, most in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if whole < most * length:
            return f"{whole // length} {unit}"
    return f"{whole // 86400} d"


def clock(seconds: float) -> str:
    """``0:20``, ``1:02:03``: a time span where space is short."""
    minutes, rest = divmod(math.ceil(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


class Meter:
    """A stage's progress, speed and ETA. Times are seconds of a monotonic clock."""

    def __init__(self, started: StageStarted, now: float) -> None:
        self.title = clean(started.title)
        self.unit = started.unit
        self.total = started.total
        self.done = 0
        self.note = ""
        self.started = self.printed = now  # when it started, and when its last line was printed
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, progress: Progress, now: float) -> None:
        """Apply one event. The first is the base of the speed, which excludes bytes that an earlier transfer sent."""
        self.done = progress.done
        self.total = self.total if progress.total is None else progress.total
        self.note = clean(progress.note)
        if not self._samples or now - self._samples[-1][0] >= 0.5:
            self._samples.append((now, progress.done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - SPEED_WINDOW:
            self._samples.popleft()

    def speed(self, now: float) -> float | None:
        """Units per second; None until enough events have arrived."""
        if not self._samples:
            return None
        since, done = self._samples[0]
        return (self.done - done) / (now - since) if now - since >= 1 and self.done > done else None

    def numbers(self, now: float) -> str:
        """``1.2/3.4 GB, 110 MB/s, 0:20 left``."""
        if not (self.total or self.done):
            return ""
        show = size if self.unit == "bytes" else str
        parts = [show(self.done)]
        if self.total:
            total = show(self.total)
            parts = [f"{parts[0].removesuffix(total.lstrip('0123456789.'))}/{total}"]
        speed = self.speed(now)
        if speed and self.unit == "bytes":
            parts.append(f"{size(speed)}/s")
        if speed and self.total and self.done < self.total:
            parts.append(f"{clock((self.total - self.done) / speed)} left")
        return ", ".join(parts)

    def label(self) -> str:
        """The title and the stage's current note."""
        return f"{self.title}: {self.note}" if self.note else self.title

    def line(self, now: float) -> Line:
        """The stage's current state, where no bar can be drawn: how long it takes, if it has no numbers."""
        percent = f"{min(100 * self.done // self.total, 100)} %" if self.total else ""
        numbers = self.numbers(now) or duration(now - self.started)
        return Line(f"{self.title}: " + ", ".join(part for part in (percent, numbers, self.note) if part))


# --- text ----------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Text from a node without escape sequences and control characters, which a terminal would obey."""
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").rstrip("\r")
    text = "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))  # a progress bar draws over itself
    return _CONTROL.sub("", _ESCAPE.sub("", text)).expandtabs()


def wrap(line: Line, width: int) -> list[str]:
    """The line wrapped to ``width``; a longer word stays whole, so that paths can be copied."""
    if line.hang is None or len(line.text) <= width:
        return [line.text]
    start = " " * (len(line.text) - len(line.text.lstrip()))
    return textwrap.wrap(
        line.text.strip(),
        max(width, 20),
        initial_indent=start,
        subsequent_indent=start + " " * line.hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def state_style(state: str) -> Style:
    """Red for a failure, green for a change, no style otherwise."""
    return "red" if _BAD.search(state) else "green" if _GOOD.search(state) else ""


def fold_equal(values: Mapping[str, Hashable]) -> dict[Any, str]:
    """``{node: value}`` -> ``{value: folded nodes}``, in the order in which the values first appear.

    Reasons that differ only in the node's name, address or port are folded, with general words in place of these.
    """
    by_common: dict[Hashable, dict[Hashable, list[str]]] = {}
    for node, value in values.items():
        key = value.common if isinstance(value, Reason) else value
        by_common.setdefault(key, {}).setdefault(value, []).append(node)
    groups: dict[Hashable, list[str]] = {}
    for key, each in by_common.items():
        groups.setdefault(next(iter(each)) if len(each) == 1 else key, []).extend(itertools.chain(*each.values()))
    return {value: fold(nodes) for value, nodes in groups.items()}


def state_lines(states: Mapping[str, str]) -> list[Line]:
    """``gpu[01-02]: unchanged``."""
    return [
        line
        for state, nodes in fold_equal(states).items()
        for line in _block(f"  {nodes}: ", clean(state), state_style(state))
    ]


def finished_lines(
    title: str, event: StageFinished, marks: tuple[str, str, str] | None, nodes: int | None = None
) -> list[Line]:
    """The end of a stage. ``marks`` stand for success, partial failure and failure; without them, words do.

    ``nodes`` is the number of nodes in the stage; None: those with a state.
    """
    if event.running:
        return [Line(f"{title}: {event.running}")]
    bad = max(event.failed, sum(state_style(state) == "red" for state in event.states.values()))
    total = max(nodes or 0, len(event.states), bad)
    which = 0 if not bad else 1 if bad < total else 2
    took = duration(event.seconds)
    summary = f", {clean(event.summary)}" if event.summary else ""
    if marks:
        head = Line(f"{marks[which]} {title} ({took}){summary}", _ENDS[which])
    else:
        words = ("done in", f"failed on {bad} of {total} nodes after", "failed after")
        head = Line(f"{title}: {words[which]} {took}{summary}")
    return [head, *state_lines(event.states)]


def error_lines(error: ClusterctlError) -> list[Line]:
    """What failed, where, and the next command."""
    name = "" if isinstance(error, InterruptedByUser) else "error: "
    lines = _block(name, clean(str(error)), "red")
    if isinstance(error, ListedError):
        lines += [line for problem in error.problems for line in _block("  ", clean(problem))]
    if isinstance(error, NodesError):
        for reason, nodes in fold_equal(error.reasons).items():
            lines += _block(f"  {nodes}: ", clean(reason))
    if error.hint:
        lines += _to_paste(_block("try: ", clean(error.hint), "bold"))
    return lines


def finding_lines(findings: Iterable[Finding]) -> list[Line]:
    """Findings with their reason and fix; findings that differ only in the node are folded."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        groups.setdefault(dataclasses.replace(finding, node=""), []).append(finding.node)
    lines: list[Line] = []
    for finding, nodes in groups.items():
        expected = f" (expected: {finding.expected})" if finding.expected else ""
        head = f"{finding.verdict:<7} {finding.check}  {fold(nodes)}: "
        lines += _block(head, clean(finding.observed + expected), _VERDICT[finding.verdict])
        if finding.why:
            lines += _block(" " * 8, clean(finding.why))
        if finding.fix:
            lines += _to_paste(_block(" " * 8 + "try: ", clean(finding.fix), "bold"))
    return lines


def step_lines(results: Mapping[str, tuple[StepResult, ...]]) -> list[Line]:
    """A table of steps, with states folded over the nodes and a failed step's output below it."""
    steps: dict[str, dict[str, tuple[str, str]]] = {}
    for node, outcomes in results.items():
        for outcome in outcomes:
            detail = outcome.detail if outcome.state == "failed" else ""
            steps.setdefault(outcome.name, {})[node] = (outcome.state, detail)
    if not steps:
        return []
    wide = min(max(len(name) for name in [*steps, "step"]), 40)
    lines = [Line(f"{'step':<{wide}}  {'state':<12}  nodes", "dim")]
    for name, states in steps.items():
        shown = name
        for (state, detail), nodes in fold_equal(states).items():
            lines.append(Line(f"{shown:<{wide}}  {state:<12}  {nodes}", _STEP.get(state, ""), hang=wide + 16))
            lines += _block("    ", clean(detail).strip("\n")) if detail.strip() else []
            shown = ""
    return lines


def _to_paste(lines: list[Line]) -> list[Line]:
    """A hint. One that names a command is never wrapped, because a pasted line break would cut the command."""
    return [line._replace(hang=None if "clusterctl " in line.text else 4) for line in lines]


def _block(head: str, text: str, style: Style = "") -> list[Line]:
    """``head`` and a text; a text of several lines starts below ``head``."""
    first, *more = text.split("\n")
    if not more:
        return [Line(head + first, style)]
    indent = " " * (len(head) - len(head.lstrip()))
    rows = more if not head.strip() or head == "error: " else [first, *more]
    top = head + first if rows is more else head.rstrip()
    deeper = indent if not head.strip() else indent + "  "
    return [Line(top, style), *(Line(f"{deeper}{row}", hang=None) for row in rows)]


# --- JSON ----------------------------------------------------------------------------------------


def error_data(error: ClusterctlError) -> dict[str, Any]:
    """An error for programs."""
    data: dict[str, Any] = {"message": str(error), "exit_code": error.exit_code, "hint": error.hint}
    if isinstance(error, ListedError):
        data["problems"] = list(error.problems)
    if isinstance(error, NodesError):
        data["reasons"] = dict(error.reasons)
    return {"error": data}


def plain(value: Any) -> Any:
    """A value as JSON: dataclasses as objects, paths as text, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted(plain(item) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
