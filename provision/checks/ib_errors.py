"""ib.errors: InfiniBand ports receive without errors.

Counters of PortCounters but for symbol errors (ib.symbols) and lost links (ib.flap). More than 10 since the reset is
what ibqueryerrors (infiniband-diags, error_thresholds) reports.
"""

from provision.checks.kit import Answers, Judgements, Plan
from provision.checks.kit.infiniband import COUNTERS, NAMES, judged_counts

ROOT = True
TITLE = "no errors on InfiniBand links"
WHY = "Packets that arrive damaged are sent again, and every all-reduce waits for the slowest link."
PROBE = COUNTERS
TIMEOUT = 30
LIMITS = {"errors": 10}

_OTHERS = ("symbol_error", "link_downed")
_FIX = "clean, reseat, then replace the cable of {cable}; perfquery -R sets the counters to zero"


def judge(seen: Plan, answers: Answers) -> Judgements:
    """Name the ports whose errors grow, or are many."""
    names = [name for name in NAMES if name not in _OTHERS]
    yield from judged_counts(answers, names, seen.limits["errors"], _FIX)
