"""ib.flap: InfiniBand links stay up.

``link_downed`` of a port counts how often its link was lost since the driver was loaded; a restart of the switch or the
driver of the other end costs a few. ibqueryerrors (infiniband-diags, error_thresholds) reports more than 10.
"""

from provision.checks.kit import Answers, Judgements, Plan
from provision.checks.kit.infiniband import COUNTERS, judged_counts

ROOT = True
TITLE = "InfiniBand links that stay up"
WHY = "A link that comes and goes ends the training with a NCCL timeout each time it is away for long enough."
PROBE = COUNTERS
TIMEOUT = 30
LIMITS = {"times": 10}

_FIX = "reseat, then replace the cable of {cable}; the switch's log tells when the link was lost"


def judge(seen: Plan, answers: Answers) -> Judgements:
    """Name the ports that have lost their link often."""
    yield from judged_counts(answers, ("link_downed",), seen.limits["times"], _FIX)
