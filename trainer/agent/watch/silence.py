"""Measures how long a run has been silent, and decides how long is too long.

The limit depends on the phase (``phases.py``):

- Announced training: 20 times the median of the last step times, at least 120 s, and at least twice the longest step so
  far (this part at most 30 minutes). Only a step, a line or a growing log breaks the silence (a progress bar is not a
  line until it ends).
- With ``hang.after``: that many seconds in training, from the first step on.
- Otherwise (before the first five step times, loading, tokenizing, evaluating, saving, a script that announces
  nothing): 30 minutes in which no process reads or writes more than a trickle. While the phase is unknown, processor
  time counts too, because the script may never print.

Time in which the agent itself was delayed (the machine slept) does not count.
"""

from __future__ import annotations

import collections
import os
from typing import Any, Deque, Dict, Iterable, Optional, Tuple

from ..processes.proc import Stat
from ..processes.ranks import Proc
from ..reader import step
from . import phases

PACE = 20  # times the median step
SHORT = 120.0  # seconds; the minimal limit in training
LONG = 1800.0  # seconds; the minimal limit in every other phase
STEPS = 5  # step times that are needed for a median
REMEMBERED = 50  # step times that are kept
QUIET = 60.0  # seconds of silence before the processes' reads and writes are measured
MEASURE = 10.0  # seconds between measurements
TRICKLE = 16 << 10  # bytes a second: threads that sample the machine move less, real work more
BUSY = 0.5  # of one core

TICKS = os.sysconf("SC_CLK_TCK")


class Silence:
    """The signs of life of one attempt of a run. All times are from a monotonic clock."""

    def __init__(self, after: Optional[float], proc: Proc) -> None:
        self._after = after  # seconds; None: the pace of the run decides
        self._proc = proc
        self.phases = phases.Phases()
        self.step: Optional[int] = None
        self.steps = 0  # that were seen
        self.stepped: Optional[float] = None  # when the last one was seen
        self.last_sign = 0.0  # a step, a line, a byte
        self._moved = 0.0  # real reading or writing
        self._measured: Optional[Tuple[float, Dict[int, Tuple[int, int]]]] = None  # bytes and ticks of each process
        self._paced: Optional[float] = None  # the last step whose time counts
        self._paces: Deque[float] = collections.deque(maxlen=REMEMBERED)
        self._longest = 0.0
        self._mixed = False  # the phase was not always training since that step
        self._events = False  # steps come as events, so lines about the same steps are not counted
        self._speaker: Optional[int] = -1  # the rank whose lines are counted: several ranks may print the same step

    def start(self, now: float) -> None:
        """Restart the measurement: at the first look, and after a delay of the agent."""
        self.last_sign = self._moved = now
        self._measured = self._paced = None

    def line(self, rank: Optional[int], text: str, now: float) -> None:
        """Take a line of a rank, or of the launcher (None)."""
        self.last_sign = now
        self.phases.line(text, now)
        self._mix()
        if self._events:
            return
        number = step(text)
        trainers = phases.TRAINER_STEP in text
        if number is None and not trainers:
            return
        if self._speaker == -1:
            self._speaker = rank
        if rank == self._speaker and (number is None or number != self.step):
            self.phases.step(now)
            self._step(self.step if number is None else number, now, paced=trainers or self.phases.uses_phase_lines)

    def progress(self, event: Dict[str, Any], now: float) -> None:
        """Take the fields of a progress event."""
        self.last_sign = now
        if not self._events:
            self._events = True
            self._paced = None
        self.phases.progress(event, now)
        if event.get("step") != self.step:
            self._step(event.get("step"), now, paced=True)

    def _mix(self) -> None:
        self._mixed = self._mixed or self.phases.current != phases.TRAINING

    def _step(self, number: Optional[int], now: float, paced: bool) -> None:
        self.step, self.stepped = number, now
        self.steps += 1
        if not paced:
            return
        if self._paced is not None and not self._mixed:
            self._paces.append(now - self._paced)
            self._longest = max(self._longest, self._paces[-1])
        self._paced = now
        self._mixed = self.phases.current != phases.TRAINING

    def limit(self) -> Tuple[float, bool]:
        """The current limit in seconds, and whether only steps, lines and logs break the silence."""
        training = self.phases.current == phases.TRAINING
        if training and self.steps and self._after:
            return float(self._after), True
        if training and self.phases.announces and len(self._paces) >= STEPS:
            return max(PACE * _median(self._paces), SHORT, min(2 * self._longest, LONG)), True
        return max(LONG, float(self._after or 0)), False

    def judge(self, members: Dict[int, Stat], now: float) -> Optional[str]:
        """The reason why the run counts as hanging, or None. ``members`` are its living processes."""
        if now - self.last_sign >= QUIET:
            self._measure(members, now)
        else:
            self._measured = None
        limit, strict = self.limit()
        silent = now - (self.last_sign if strict else max(self.last_sign, self._moved))
        if silent < limit:
            return None
        if strict:
            last = "the last was step %d" % self.step if self.step is not None else "there were %d steps" % self.steps
            pace = ", and a step takes %s" % time_span(_median(self._paces)) if self._paces else ""
            return "no step for %s; %s%s" % (time_span(silent), last, pace)
        return "no output, no reads and no writes for %s (phase %s)" % (time_span(silent), self.phases.current)

    def _measure(self, members: Dict[int, Stat], now: float) -> None:
        """Measure whether the processes have read or written since the last measurement."""
        if self._measured is not None and now - self._measured[0] < MEASURE:
            return
        amounts = {}
        for pid in members:
            stat = self._proc.stat(pid)
            amounts[pid] = (self._proc.bytes_moved(pid), stat.ticks if stat else 0)
        if self._measured is not None:
            then, before = self._measured
            both = [(amount, before[pid]) for pid, amount in amounts.items() if pid in before]
            moved = sum(max(0, is_[0] - was[0]) for is_, was in both)
            worked = sum(max(0, is_[1] - was[1]) for is_, was in both) / TICKS
            at_work = self.phases.current == phases.STARTING and worked >= BUSY * (now - then)
            if moved >= TRICKLE * (now - then) or at_work:
                self._moved = now
        self._measured = (now, amounts)


def _median(values: Iterable[float]) -> float:
    """The middle of some values; statistics.median would cost a tenth of an agent's start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


def time_span(seconds: float) -> str:
    """Write a time span in seconds, minutes or hours, for messages."""
    if seconds < 120:
        return "%.3g s" % seconds
    return "%d min" % (seconds // 60) if seconds < 7200 else "%.1f h" % (seconds / 3600)
