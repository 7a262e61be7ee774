"""The effective training time of a run, for people and for ``--json``."""

from __future__ import annotations

from typing import Any

from provision.output_text import duration, span
from provision.run.effective import Judged
from trainer.agent.contract.effective import Effective

UNKNOWN = "unknown"


def ratio_of(spent: Effective | None) -> str:
    """``93.1 %``; ``unknown`` for an older run, and before the first step."""
    return UNKNOWN if spent is None or spent.ratio is None else f"{100 * spent.ratio:.1f} %"


def effective_text(spent: Effective | None) -> str:
    """``effective training time 93.1 % of 2 h 05 min: starting 3.2 %, saving 2.1 %``, the largest parts first."""
    if spent is None:
        return "effective training time unknown: the agent of an older version started this run"
    if spent.ratio is None:
        return "effective training time unknown: no step reported yet"
    others = sorted(spent.parts()[1:], key=lambda part: -part[1])
    shares = [(name, 100 * seconds / spent.total) for name, seconds in others]
    listed = ", ".join(f"{name} {share:.1f} %" for name, share in shares if share >= 0.05)
    stopped = f"; it lay stopped for {span(spent.stopped)}, which does not count" if spent.stopped >= 1 else ""
    return (
        f"effective training time {ratio_of(spent)} of {duration(spent.total)}"
        + (f": {listed}" if listed else "")
        + stopped
    )


def interval_text(judged: Judged) -> str:
    """When to save; "" before the first save."""
    if judged.interval is None:
        return ""
    cost = judged.spent.save_cost or 0.0
    return (
        f"best saved every {duration(judged.interval)}: a save stops the training for {cost:.2g} s, "
        f"and a failure is expected every {span(judged.between)}"
    )


def effective_data(judged: Judged | None) -> dict[str, Any] | None:
    """For ``--json``: seconds, counts, the ratio, the advice; None for an older run."""
    if judged is None:
        return None
    spent = judged.spent
    return {
        **spent.to_object(),
        "total": round(spent.total, 3),
        "ratio": None if spent.ratio is None else round(spent.ratio, 4),
        "advice": judged.advice,
        "save_seconds": spent.save_cost,
        "best_interval": None if judged.interval is None else round(judged.interval, 1),
        "time_between_failures": round(judged.between, 1),
    }
