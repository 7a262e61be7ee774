"""Judges the run as a whole: whether its steps take longer, or its GPUs hold more, than expected.

No comparison between ranks can detect this, because ranks wait for each other. Only rank 0's node judges. It measures
every run, so that a later one can be compared with it (``measured`` in ``state.json``).

- A *slice* is at least ``SLICE`` seconds and one step long. Time in evaluations and checkpoints does not count. A slice
  that is mostly pause is dropped.
- A *window* has at least ``SLICES`` slices, and ``STEPS`` steps or ``LONG`` seconds. Its pace is its time by its
  steps, without slices of ``PAUSE`` times the median: pauses that the run does not announce. The agent sees a step
  up to a quarter of a second late, which would bias the median itself: it has few different values.
- The first window warms up. Then ``ROUNDS`` consecutive windows beyond the band make the run slow, and as many within
  it make it normal again. Each change is one notice.

Steps that are shorter than expected are no problem.
"""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from .contract.expected import Expected, Range
from .notify import SLOWDOWN
from .run_files import Events, NodePlan, State
from .silence import TRAINING, median

SLICE = 2.0  # seconds, at least
SLICES = 5
STEPS = 20
LONG = 60.0
PAUSE = 1.5
ROUNDS = 3
REMEMBERED = 2000  # windows: at least five hours
TAIL = 0.05  # share of the windows below and above the measured range: a short slow phase is not part of it


class Change(NamedTuple):
    """The run left the band, or is back in it: what to report."""

    bad: bool
    text: str


class Limit:
    """Compares values with an upper limit. ``ROUNDS`` in a row on the other side are a change."""

    def __init__(self, limit: float) -> None:
        self.beyond = False
        self._limit = limit
        self._count = 0

    def take(self, value: float) -> bool:
        """Take a value. True if it is the one that changes the side."""
        self._count = self._count + 1 if (value > self._limit) != self.beyond else 0
        if self._count < ROUNDS:
            return False
        self.beyond, self._count = not self.beyond, 0
        return True


class Judge:
    """The measured pace and memory of one attempt. Times are from a clock that goes forward."""

    def __init__(self, expected: Optional[Expected] = None) -> None:
        self._expected = expected or Expected()
        step, memory = self._expected.step_seconds, self._expected.memory_bytes
        self._step_limit = Limit(step[1]) if step else None
        self._memory_limit = Limit(memory[1]) if memory else None
        self._since: Optional[Tuple[int, float, float]] = None  # step, time and pauses at the start of the slice
        self._last: Optional[float] = None  # the last look
        self._paused = 0.0  # seconds so far in which the run did not train
        self._slices: List[Tuple[float, int]] = []  # seconds and steps
        self._speeds: List[float] = []
        self._warm = False
        self._windows: Deque[float] = collections.deque(maxlen=REMEMBERED)
        self._tokens: Deque[float] = collections.deque(maxlen=REMEMBERED)
        self._memory: Deque[float] = collections.deque(maxlen=REMEMBERED)
        self.fresh = False  # something was measured since the last ``measured``
        self.slow: Optional[str] = None  # in words, while the run is slow
        self.full: Optional[str] = None  # in words, while it uses more memory than expected

    def look(self, phase: str, now: float) -> None:
        """Take the phase of the run, about once a second."""
        if self._last is not None and phase != TRAINING:
            self._paused += now - self._last
        self._last = now

    def step(self, step: int, now: float, tokens: Optional[float] = None) -> Optional[Change]:
        """Take a reported step, with its tokens per second if known."""
        if tokens is not None and 0 < tokens < float("inf"):
            self._speeds.append(tokens)
        if self._since is None or step < self._since[0]:
            self._since = (step, now, self._paused)
            return None
        first, began, paused = self._since
        trained = now - began - (self._paused - paused)
        if step == first or now - began < SLICE:
            return None
        self._since = (step, now, self._paused)
        if 2 * trained < now - began:
            return None
        self._slices.append((trained, step - first))
        time, steps = (sum(each) for each in zip(*self._slices))  # noqa: B905 - Python 3.8
        full = len(self._slices) >= SLICES and (steps >= STEPS or time >= LONG)
        return self._window() if full else None

    def _window(self) -> Optional[Change]:
        pace, speeds = pace_of(self._slices), self._speeds
        self._slices, self._speeds = [], []
        if not self._warm:
            self._warm = True
            return None
        self._windows.append(pace)
        self.fresh = True
        if speeds:
            self._tokens.append(median(speeds))
        if self._step_limit is None or not self._step_limit.take(pace):
            return None
        found = "%s a step, expected %s" % (seconds(pace), span_of(self._expected.step_seconds, seconds))
        basis = " (%s)" % self._expected.basis if self._expected.basis else ""
        if not self._step_limit.beyond:
            self.slow = None
            return Change(bad=False, text="the run as a whole is as fast as expected again: %s" % found)
        self.slow = "the run as a whole is slow: %s%s" % (found, basis)
        return Change(bad=True, text=self.slow)

    def memory(self, used: float) -> Optional[Change]:
        """Take the memory of the fullest GPU in a sample."""
        self._memory.append(used)
        self.fresh = True
        if self._memory_limit is None or not self._memory_limit.take(used):
            return None
        found = "%s, expected %s" % (gigabytes(used), span_of(self._expected.memory_bytes, gigabytes))
        basis = " (%s)" % self._expected.basis if self._expected.basis else ""
        if not self._memory_limit.beyond:
            self.full = None
            return Change(bad=False, text="GPU memory is as expected again: %s" % found)
        self.full = "a GPU holds more than expected: %s%s" % (found, basis)
        return Change(bad=True, text=self.full)

    def measured(self) -> Dict[str, List[float]]:
        """What was measured so far: low, median and high."""
        self.fresh = False
        known = {"step_seconds": self._windows, "tokens_per_second": self._tokens, "memory_bytes": self._memory}
        return {name: spread(values) for name, values in known.items() if values}


class Pace:
    """Measures and judges one attempt on rank 0's node, and reports changes. Other nodes do nothing."""

    def __init__(self, plan: NodePlan, events: Events, state: State) -> None:
        self._plan, self._events, self._state = plan, events, state
        self._judge = Judge(plan.data.expected) if plan.rank == 0 else None
        if plan.rank == 0 and plan.data.expected is not None:
            state.note(expected=plan.data.expected.to_object())
        state.note(slow=None, full=None)

    def look(self, phase: str, now: float) -> None:
        """Take the phase of the run."""
        if self._judge is not None:
            self._judge.look(phase, now)

    def progress(self, fields: Dict[str, Any], now: float) -> None:
        """Take the fields of a progress event."""
        step, tokens = fields.get("step"), fields.get("tokens_per_second")
        if self._judge is None or not isinstance(step, int):
            return
        change = self._judge.step(step, now, tokens if isinstance(tokens, (int, float)) else None)
        self._report(change, SLOWDOWN)

    def sample(self, sample: Dict[str, Any]) -> None:
        """Take a sample of this node."""
        used = [gpu["memory"] for gpu in sample.get("gpus") or () if gpu.get("memory")]
        if self._judge is not None and used and self._state.fields.get("phase") == TRAINING:
            self._report(self._judge.memory(max(used)), None)

    def _report(self, change: Optional[Change], kind: Optional[str]) -> None:
        assert self._judge is not None
        if self._judge.fresh:
            self._state.note(measured=self._judge.measured())
        if change is None:
            return
        self._state.set(slow=self._judge.slow, full=self._judge.full)
        if change.bad:
            text = "%s. Next: clusterctl diagnose %s" % (change.text, self._plan.run)
            self._events.emit("notice", text=text, **({"kind": kind} if kind else {}))
        else:
            self._events.emit("notice", level="info", text=change.text)


def pace_of(slices: Sequence[Tuple[float, int]]) -> float:
    """Seconds per step of slices, without those that are much longer than the others."""
    middle = median(time / steps for time, steps in slices)
    kept = [(time, steps) for time, steps in slices if time / steps <= PAUSE * middle]
    return sum(time for time, _ in kept) / sum(steps for _, steps in kept)


def spread(values: Iterable[float]) -> List[float]:
    """The low, the median and the high value, without the tails."""
    ordered = sorted(values)
    tail = int(TAIL * len(ordered))
    return [ordered[tail], median(ordered), ordered[-1 - tail]]


def seconds(value: float) -> str:
    """Write seconds with three digits, for messages."""
    return "%.3g s" % value


def gigabytes(value: float) -> str:
    """Write bytes in GB with three digits, for messages."""
    return "%.3g GB" % (value / 1e9)


def span_of(found: Optional[Range], unit: Any) -> str:
    """Write a range, for messages: ``0.4 to 0.6 s``."""
    return "" if found is None else "%s to %s" % (unit(found[0]).partition(" ")[0], unit(found[1]))
