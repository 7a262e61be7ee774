"""Accounts for the time of a run on one node: training, starting, saving, recovering, repeating, waiting. Pure.

``Account.take`` gets the agent's events one after the other. The agent does this while it runs, and writes the result
into ``state.json``. ``account`` does the same afterwards with the events in ``events.jsonl``.

- Time is training when a step is reported. So the part of a step that a failure interrupts is recovering.
- A step up to the highest one so far is repeating.
- The first report of an attempt covers the start and some steps. These steps count at the run's usual pace.
- A save costs the time of the phase ``saving``, but at most what the steps around it took beyond the usual pace: a
  phase may last until the next line of a trainer. A save that continues during the next steps costs only its pause.
- Where an attempt reports no step, the phases that it announces count.
- A clock that is set back costs nothing. One that is set forward counts as time, because nothing tells it from a
  machine that slept. The agent therefore uses a clock that only goes forward.

Steps are booked in slices of at least ``SLICE`` seconds, because an agent sees a step up to a quarter of a second late.
"""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, Iterable, Mapping, NamedTuple, Optional

from .contract.effective import PARTS, Effective
from .contract.untrusted import finite, is_whole

TRAINING, STARTING, SAVING, RECOVERING, REPEATING, WAITING = PARTS
SLICE = 2.0  # seconds of steps, and seconds after a save in which its cost shows
PACES = 50  # slices of which the median is the usual pace
_STEPS = "steps"  # the mode after the first step of an attempt
_EVALUATING = "evaluating"
_COUNTS = ("saves", "restarts", "failures", "repeated")
_MANY = 1 << 40  # of saves and restarts in another node's account, which may be wrong
_FAR = 1e11  # epoch seconds that no clock shows


class _Phases:
    """What happened in an interval: seconds of each phase, the number of saves, seconds without other nodes."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self.saves = 0
        self.silence = 0.0

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, seconds)

    def merge(self, other: "_Phases") -> None:
        for phase, seconds in other.seconds.items():
            self.add(phase, seconds)
        self.saves += other.saves
        self.silence += other.silence


class _Booking(NamedTuple):
    """The parts of an interval, the steps made again in it, and what is left of a save's credit."""

    parts: Dict[str, float]
    repeated: int = 0
    credit: float = 0.0


class Account:
    """The account of a run on one node. Times are from any clock that counts seconds.

    Args:
        before: the account of earlier starts of the run.
        failed: whether the start before has failed, or was lost without an end.
        ended: when the run was last seen.
    """

    def __init__(self, before: Optional[Effective] = None, failed: bool = False, ended: Optional[float] = None) -> None:
        before = before or Effective()
        self._parts: Dict[str, float] = dict(before.parts())
        self._stopped = before.stopped
        self._counts: Dict[str, int] = {name: getattr(before, name) for name in _COUNTS}
        self._top = before.top
        self._pace = before.pace  # of earlier starts
        self._paces: Deque[float] = collections.deque(maxlen=PACES)
        self._failed = failed
        self._mode: Optional[str] = None  # None: no agent is running
        self._met = False  # the nodes have met since the agent started
        self._at = ended or 0.0  # all time before is booked
        self._known = ended is not None
        self._now = self._at  # the latest time of an event
        self._stepped_at = self._at  # the last report of a step
        self._first: Optional[int] = None  # the step at ``_at``, or of the checkpoint
        self._last: Optional[int] = None
        self._credit = 0.0  # of a save that looked cheaper than nothing; not above 0
        self._saved_at = 0.0  # when the last save was seen
        self._phase, self._phase_at = "", 0.0
        self._silent: Optional[float] = None  # since when another node is silent
        self._slice, self._rest = _Phases(), _Phases()  # until the last step, and since then

    def begin(self, now: float) -> None:
        """Start: an agent owns the run now."""
        if self._known:
            self._stopped += max(0.0, now - self._at)
        self._at = self._stepped_at = now
        self._now = max(now, self._now)
        self._known, self._met = True, False
        self._mode = RECOVERING if self._failed and self._top is not None else STARTING
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._first = self._last = None
        self._trained = False  # it reported progress, with or without a step
        self._phase, self._silent = "", None
        self._slice, self._rest = _Phases(), _Phases()

    def take_over(self, known: Effective, mine: Effective, now: float) -> None:
        """Continue the account of a node that is lost, between two attempts.

        Nothing changes if this node has seen as many steps itself. The time since the lost node was last heard is
        waiting where this account says so, and else recovering: whether steps were made in it is not known.

        Args:
            known: the account of the lost node when it was last heard.
            mine: this account at that time.
            now: the time.
        """
        own = self.effective(now)
        trained = own.training + own.repeating
        if trained and trained >= known.training + known.repeating:
            return
        passed = max(0.0, own.total - mine.total)
        waited = min(passed, max(0.0, own.waiting - mine.waiting))
        failed = max(0, own.restarts - mine.restarts)
        self._parts = dict(known.parts())
        self._parts[WAITING] += waited
        self._parts[RECOVERING] += passed - waited
        self._counts = {name: min(_MANY, getattr(known, name)) for name in _COUNTS}
        self._counts["restarts"] += failed
        self._counts["failures"] += failed if known.top is not None else 0
        self._stopped, self._top, self._pace = known.stopped, known.top, known.pace
        self._paces.clear()
        self._credit = 0.0
        if self._mode != WAITING:
            self._mode = STARTING if self._top is None else RECOVERING
        self._now = max(now, self._now)
        self._at = self._stepped_at = self._now
        self._begin_attempt()

    def take(self, event: Mapping[str, Any], now: Optional[float] = None) -> None:
        """Take an event. ``now`` replaces its time. Skips an event without a usable time."""
        found = usable_time(event.get("time") if now is None else now)
        if found is None:
            return
        now = self._now = max(found, self._now)
        kind = event.get("event")
        if kind == "attempt":
            self._attempt(event, now)
        elif self._mode is None:
            return
        elif kind == "phase":
            self._enter(str(event.get("phase") or ""), now)
        elif kind == "progress":
            self._trained = True
            self._progress(event.get("step"), now)
        elif kind == "peer":
            self._peer(event.get("state"), now)
        elif kind == "notice" and event.get("kind") == "restart":
            self._fail(now)
        elif kind == "end":
            self._failed = event.get("state") == "failed"
            self._close(now, failed=self._failed)
            self._mode = None

    def _attempt(self, event: Mapping[str, Any], now: float) -> None:
        again = event.get("attempt") != 1
        if not again and self._met and self._mode is not None:  # another agent: the one before was killed
            self._settle()  # what it did after its last step is not known
            self._mode, self._failed = None, True
        elif again and self._mode is not None and self._mode != WAITING:
            self._fail(now)
        if self._mode is None:
            began = usable_time(event.get("began"))
            self.begin(began if began is not None and self._at <= began <= now else now)
        self._parts[str(self._mode)] += now - self._at
        self._at = self._stepped_at = now
        self._mode = RECOVERING if again else self._mode
        self._met = True
        self._begin_attempt()
        if _is_step(event.get("step")):
            self._first = event["step"]
        elif event.get("checkpoint") is None:
            self._first = 0

    def _fail(self, now: float) -> None:
        self._close(now, failed=True)
        self._counts["restarts"] += 1
        self._mode = WAITING

    def _enter(self, phase: str, now: float) -> None:
        if self._phase:
            self._rest.add(self._phase, now - max(self._phase_at, self._stepped_at))
        if phase == SAVING and self._phase != SAVING:
            self._rest.saves += 1
        if SAVING in (phase, self._phase):
            self._saved_at = now
        self._phase, self._phase_at = phase, now

    def _peer(self, state: Any, now: float) -> None:
        if state == "lost" and self._silent is None:
            self._silent = now
        elif state == "back" and self._silent is not None:
            self._rest.silence += now - self._silent
            self._silent = None

    def _progress(self, step: Any, now: float) -> None:
        if not _is_step(step) or (self._mode == _STEPS and step == self._last):
            return
        self._enter(self._phase, now)
        if self._mode != _STEPS:
            self._first_step(step, now)
        elif self._last is not None and step < self._last:  # the launcher has restarted the ranks itself
            self._settle()
            self._parts[RECOVERING] += now - self._at
            self._at, self._first = now, step
        self._slice.merge(self._rest)
        self._rest = _Phases()
        self._last, self._stepped_at = step, now
        settled = now - self._saved_at >= SLICE and self._phase != SAVING
        if now - self._at >= SLICE and (settled or not self._slice.saves):
            self._settle()

    def _first_step(self, step: int, now: float) -> None:
        """Book the start of an attempt, with the steps that its first report covers."""
        took, pace, first = now - self._at, self._usual(), self._first
        made = step - first if first is not None and step > first else 0
        steps = min(took, made * pace) if pace is not None else 0.0
        self._parts[str(self._mode)] += took - steps
        self._book(_Booking(self._steps(step - made, step, steps), self._again(step - made, step)), step)
        self._counts["saves"] += self._rest.saves
        self._rest = _Phases()
        self._at, self._mode, self._first = now, _STEPS, step

    def _settle(self) -> None:
        """Book the steps since ``_at``, and remember their pace."""
        made, took = self._made(), self._stepped_at - self._at
        if not made:
            return
        booking = self._booking()
        self._credit = booking.credit
        self._book(booking, self._last or 0)
        if took >= SLICE and not (self._slice.saves or self._slice.silence or _EVALUATING in self._slice.seconds):
            self._paces.append(took / made)
        self._counts["saves"] += self._slice.saves
        self._at, self._first, self._slice = self._stepped_at, self._last, _Phases()

    def _made(self) -> int:
        known = self._mode == _STEPS and self._first is not None and self._last is not None
        return max(0, (self._last or 0) - (self._first or 0)) if known else 0

    def _booking(self) -> _Booking:
        """The parts of the steps since ``_at``."""
        made, first, last = self._made(), self._first or 0, self._last or 0
        took, pace, credit = self._stepped_at - self._at, self._usual(), self._credit
        if not made:
            return _Booking({}, 0, credit)
        happened, saved, waited = self._slice, 0.0, 0.0
        if happened.saves or SAVING in happened.seconds:
            saved = min(took, happened.seconds.get(SAVING, 0.0))
            if pace is not None and _EVALUATING not in happened.seconds:
                cost = took - made * pace + credit
                credit = min(0.0, max(-pace, cost))
                saved = min(saved, max(0.0, cost))
        elif happened.silence and pace is not None:
            waited = min(happened.silence, max(0.0, took - made * pace))
        parts = dict(self._steps(first, last, took - saved - waited), **{SAVING: saved, WAITING: waited})
        return _Booking(parts, self._again(first, last), credit)

    def _again(self, first: int, last: int) -> int:
        """How many steps after ``first`` up to ``last`` were made before."""
        return 0 if self._top is None else max(0, min(last, self._top) - first)

    def _steps(self, first: int, last: int, seconds: float) -> Dict[str, float]:
        """The time of the steps after ``first`` up to ``last``."""
        again = self._again(first, last)
        share = seconds * again / (last - first) if again else 0.0
        return {REPEATING: share, TRAINING: seconds - share}

    def _book(self, booking: _Booking, last: int) -> None:
        for part, seconds in booking.parts.items():
            self._parts[part] += seconds
        self._counts["repeated"] += booking.repeated
        self._top = last if self._top is None else max(self._top, last)

    def _close(self, now: float, failed: bool) -> None:
        """Book the end of an attempt."""
        self._settle()
        if failed and self._trained:
            self._counts["failures"] += 1
        for part, seconds in self._tail(now, failed).items():
            self._parts[part] += seconds
        self._counts["saves"] += self._rest.saves
        self._at = self._stepped_at = now
        self._begin_attempt()

    def _tail(self, now: float, failed: Optional[bool]) -> Dict[str, float]:
        """The time since the last step. ``failed``: how the attempt has ended; None: it is running."""
        took = max(0.0, now - max(self._at, self._stepped_at))
        if self._mode == _STEPS and failed:
            return {RECOVERING: took}
        seconds = dict(self._rest.seconds)
        if self._phase:
            inside = max(0.0, now - max(self._phase_at, self._stepped_at))
            seconds[self._phase] = seconds.get(self._phase, 0.0) + inside
        saving = min(took, seconds.get(SAVING, 0.0))
        if self._mode == _STEPS:
            return {SAVING: saving, STARTING if failed is False else TRAINING: took - saving}
        trained = min(took - saving, seconds.get(TRAINING, 0.0) + seconds.get(_EVALUATING, 0.0))
        parts = {SAVING: saving, TRAINING: trained}
        return dict(parts, **{str(self._mode): took - saving - trained})

    def _usual(self) -> Optional[float]:
        """Seconds per step, the median; None if unknown."""
        if not self._paces:
            return self._pace
        ordered = sorted(self._paces)
        return (ordered[len(ordered) // 2] + ordered[-1 - len(ordered) // 2]) / 2

    def effective(self, now: Optional[float] = None) -> Effective:
        """The account, with the time since the last event up to ``now``."""
        parts, booking = dict(self._parts), self._booking()
        tail = self._tail(now, None) if now is not None and self._mode is not None else {}
        for open_parts in (booking.parts, tail):
            for part, seconds in open_parts.items():
                parts[part] += seconds
        top = self._last if self._mode == _STEPS else None
        counts = dict(self._counts, repeated=self._counts["repeated"] + booking.repeated)
        counts["saves"] += self._slice.saves + self._rest.saves
        values: Dict[str, Any] = dict(parts, **counts)
        return Effective(
            **values,
            stopped=self._stopped,
            top=max((step for step in (self._top, top) if step is not None), default=None),
            pace=self._usual(),
        )


def account(events: Iterable[Mapping[str, Any]]) -> Optional[Effective]:
    """The account of a run from the events of one node; None if no attempt is among them."""
    kept = Account()
    last: Optional[float] = None
    began = False
    for event in events:
        kept.take(event)
        began = began or event.get("event") == "attempt"
        last = usable_time(event.get("time")) or last
    return kept.effective(last) if began else None


def usable_time(value: Any) -> Optional[float]:
    """A time in epoch seconds; None if it cannot be one."""
    return finite(value, _FAR, 0.0)


def _is_step(value: Any) -> bool:
    return is_whole(value, 1 << 53)
