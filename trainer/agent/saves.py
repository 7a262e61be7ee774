"""Saves at the interval that ``train --save-every`` gives: ``auto`` is the best one for the measured cost of a save.

A trainer that saves on SIGUSR2 and continues (``trainer.lm``, ``trainer.vlm``) gets the signal from rank 0's agent, as
from ``clusterctl save``; its ranks decide together. Saves that it makes itself count too. Other trainers
(LLaMA-Factory) get their interval in steps as an argument when an attempt starts, so each restart refines it.
"""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any, Dict, Optional

from .contract.effective import Effective, read
from .contract.interval import HOUR, Failures, best_interval, time_between_failures, too_short
from .processes import read as read_proc
from .processes import send
from .silence import SAVING, TRAINING

if TYPE_CHECKING:
    from .contract.plan import Plan
    from .hangs import Watch
    from .run_files import Events, NodePlan, State
    from .tracker import ProcessTracker

FIRST = 300.0  # seconds from the first step to the first save, which measures the cost
COST = 30.0  # seconds of a save that is not measured yet, for trainers with a fixed interval
AGAIN = 60.0  # seconds between computations of the interval
_CHANGED = 1.25  # factor of a change that is worth a notice
_STEPS = "{steps}"  # in ``SaveEvery.argument``
_PROGRAM = re.compile(rb"\0-m\0trainer\.(lm|vlm)\0")


def interval(plan: Plan, spent: Optional[Effective], cost: Optional[float] = None) -> Optional[float]:
    """Seconds between two saves; None before the first save of ``auto``. ``cost`` replaces an unknown one."""
    assert plan.save is not None
    found = spent or Effective()
    cost = found.save_cost or cost
    if plan.save.seconds is not None:
        return plan.save.seconds if not cost else max(plan.save.seconds, 2 * cost)
    if not cost:
        return None
    failures = Failures(plan.save.failures, plan.save.node_hours)
    failures = failures.plus(found.failures, found.total / HOUR * plan.nnodes)
    return best_interval(cost, time_between_failures(plan.nnodes, failures))


def save_argument(plan: Plan, spent: Optional[Effective]) -> Optional[str]:
    """The argument that sets the interval of an attempt; None if it is not needed or the pace is not known yet."""
    if plan.save is None or not plan.save.argument:
        return None
    pace = spent.pace if spent is not None else None
    if pace is None and plan.expected is not None and plan.expected.step_seconds is not None:
        pace = sum(plan.expected.step_seconds) / 2
    seconds = interval(plan, spent, COST)
    if not pace or seconds is None:
        return None
    return plan.save.argument.replace(_STEPS, str(max(1, round(seconds / pace))))


class Saves:
    """Lets the trainer of one attempt save when it is time. Only rank 0's agent does."""

    def __init__(self, plan: NodePlan, watch: Watch, tracker: ProcessTracker, events: Events, state: State) -> None:
        self._plan, self._watch, self._tracker = plan.data, watch, tracker
        self._events, self._state = events, state
        self._active = plan.data.save is not None and not plan.data.save.argument and plan.rank == 0
        self._since: Optional[float] = None  # the last save, or the first step
        self._saves = 0
        self._computed: Optional[float] = None  # when ``_interval`` was
        self._interval: Optional[float] = None
        self._shown: Optional[float] = None
        self._warned = False

    def look(self, now: float) -> None:
        """Ask for a save if it is due."""
        if not self._active or self._watch.stepped is None:
            return
        if self._since is None or self._watch.saves != self._saves or self._watch.phase == SAVING:
            self._saves, self._since = self._watch.saves, now
        if self._computed is None or now - self._computed >= AGAIN:
            self._computed = now
            self._compute()
        if self._watch.phase == TRAINING and now - self._since >= (self._interval or FIRST):
            self._since = now
            self._ask()

    def _compute(self) -> None:
        spent = known_account(self._state)
        self._interval = interval(self._plan, spent)
        cost = spent.save_cost if spent is not None else None
        save = self._plan.save
        if save is not None and save.seconds is not None and not self._warned:
            why = too_short(save.seconds, cost)
            if why:
                self._warned = True
                self._events.emit("notice", text="--save-every: %s; saving every %.0f s" % (why, self._interval or 0))
        if self._interval is None:
            return
        self._state.note(save_every=round(self._interval, 1))
        if self._shown is None or not 1 / _CHANGED < self._interval / self._shown < _CHANGED:
            self._shown = self._interval
            what = "" if cost is None else ": a save stops the training for %.2g s" % cost
            self._events.emit("notice", level="info", text="saving every %.0f s%s" % (self._interval, what))

    def _ask(self) -> None:
        asked = 0
        for pid, stat in self._tracker.known.items():
            if catches(read_proc("/proc/%d/status" % pid)) and _PROGRAM.search(read_proc("/proc/%d/cmdline" % pid)):
                asked += send(pid, stat, signal.SIGUSR2)
        if not asked and not self._warned:
            self._warned = True
            self._events.emit("notice", text="--save-every: no process of the trainer catches SIGUSR2, so none saves")


def catches(status: bytes, number: int = signal.SIGUSR2) -> bool:
    """Whether a process catches a signal, from /proc/PID/status (proc(5)): one that does not would die of it."""
    found = re.search(rb"^SigCgt:\s*([0-9a-f]{1,32})$", status, re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) >> (number - 1) & 1)


def known_account(state: State) -> Optional[Effective]:
    """The account of the run so far."""
    spent: Optional[Dict[str, Any]] = state.account() if state.account is not None else None
    return read(spent)
