"""The effective training time of a run as commands judge it: other runs' failures, best interval, advice. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.agent.contract import effective
from trainer.agent.contract.effective import PARTS, Effective
from trainer.agent.contract.interval import HOUR, NONE, Failures, best_interval, time_between_failures

_SHORT = 120.0  # seconds of a run too short for advice
_GOOD = 0.98  # a ratio that needs no advice
_OTHER = 1.25  # an interval counts as another one beyond this factor


@dataclass(frozen=True)
class Judged:
    """A run's time, and when it should save.

    Attributes:
        spent: where its time went.
        between: expected seconds between two failures of the run.
        interval: seconds of training between two saves that lose least; None before the first save.
        advice: what would improve the ratio most; "" if nothing would, or it is too early.
    """

    spent: Effective
    between: float
    interval: float | None
    advice: str


def observed(records: Mapping[str, Mapping[str, Any]], *, without: str = "") -> Failures:
    """The failures and node hours of recorded runs, ``without`` one of them. Skips records without an account."""
    found = NONE
    for run, record in records.items():
        spent, nodes = effective.read(record.get("spent")), record.get("nodes")
        if run != without and spent is not None and isinstance(nodes, list):
            found = found.plus(spent.failures, spent.total / HOUR * len(nodes))
    return found


def judge(run: str, spent: Effective, nodes: int, others: Failures) -> Judged:
    """Judge a run on ``nodes`` nodes. ``others`` were observed in other runs of the same nodes."""
    failures = others.plus(spent.failures, spent.total / HOUR * nodes)
    between = time_between_failures(max(1, nodes), failures)
    cost = spent.save_cost
    interval = best_interval(cost, between) if cost else None
    return Judged(spent, between, interval, _advice(run, spent, interval))


def _advice(run: str, spent: Effective, interval: float | None) -> str:
    """One sentence about the largest part that is no training."""
    ratio, total = spent.ratio, spent.total
    if ratio is None or ratio >= _GOOD or total < _SHORT:
        return ""
    parts = dict(spent.parts())
    name = max(PARTS[1:], key=lambda part: parts[part])
    took = f"{name} took {100 * parts[name] / total:.0f} % of the time"
    restarts = f"{spent.restarts} restart{'s' if spent.restarts != 1 else ''}"
    now = (spent.training + spent.repeating) / spent.saves if spent.saves else None
    match name:
        case "starting":
            return f"{took}: a longer run starts less often; data can be tokenized beforehand"
        case "saving":
            what = f"{took}: {spent.saves} saves of {spent.save_cost or 0:.2g} s"
            if interval is not None and now is not None and interval > _OTHER * now:
                return f"{what}; a save every {typed(interval)} instead of {typed(now)} costs less"
            return f"{what}; a faster disk costs less, or saves that continue during the next steps"
        case "repeating":
            what = f"{took}: {restarts} repeated {spent.repeated} steps"
            if interval is not None and now is not None and now > _OTHER * interval:
                return f"{what}; a save every {typed(interval)} instead of {typed(now)} repeats fewer"
            return f"{what}; to see why it failed: clusterctl diagnose {run}"
        case _:
            return f"{took}: {restarts}; to see why it failed: clusterctl diagnose {run}"


def typed(seconds: float) -> str:
    """A time span as ``--save-every`` takes it: ``40s``, ``12min``, ``3h``."""
    if seconds < 120:
        return f"{max(1, round(seconds))}s"
    return f"{round(seconds / 60)}min" if seconds < 2 * HOUR else f"{round(seconds / HOUR)}h"
