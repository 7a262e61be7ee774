"""ib.symbols: InfiniBand links have no symbol errors.

``symbol_error`` of a port counts damaged symbols on the wire: the sign of a bad cable, a dirty fibre or a transceiver
that gets too warm. More than 10 since the reset is what ibqueryerrors (infiniband-diags, error_thresholds) reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._counters import COUNTERS, judged_counts
from provision.model import Finding

ID = "ib.symbols"
LEVEL = 0
ROOT = True
TITLE = "no symbol errors on InfiniBand links"
WHY = "Damaged packets are sent again: the link loses speed now and goes down later, in the middle of a training."
PROBE = COUNTERS
TIMEOUT = 30
LIMITS = {"errors": 10}

_FIX = "clean, reseat, then replace the cable of {cable}; perfquery -R sets the counters to zero"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Name the ports whose symbol errors grow, or are many."""
    yield from judged_counts(ID, answers, ("symbol_error",), seen.limits["errors"], _FIX)
