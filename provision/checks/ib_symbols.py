"""ib.symbols: InfiniBand links have no symbol errors.

``symbol_error`` of a port counts damaged symbols on the wire: the sign of a bad cable, a dirty fibre or a transceiver
that gets too warm. More than 10 since the reset is what ibqueryerrors (infiniband-diags, error_thresholds) reports.
"""

from provision.checks.kit import Answers, Judgements, Plan
from provision.checks.kit.infiniband import COUNTERS, judged_counts

ROOT = True
TITLE = "no symbol errors on InfiniBand links"
WHY = "Damaged packets are sent again: the link loses speed now and goes down later, in the middle of a training."
PROBE = COUNTERS
TIMEOUT = 30
LIMITS = {"errors": 10}

_FIX = "clean, reseat, then replace the cable of {cable}; perfquery -R sets the counters to zero"


def judge(seen: Plan, answers: Answers) -> Judgements:
    """Name the ports whose symbol errors grow, or are many."""
    yield from judged_counts(answers, ("symbol_error",), seen.limits["errors"], _FIX)
