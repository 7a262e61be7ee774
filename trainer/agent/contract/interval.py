"""When to save: the interval between checkpoints that loses least time, from a save's cost and the rate of failures.

A save every ``t`` seconds costs ``cost / t`` of the time; a failure costs half an interval on average. Young (1974)
balances the two: ``sqrt(2 * cost * M)``, where ``M`` is the mean time between failures. Daly (2006) adds terms for
costs that are not small beside ``M``. Both assume that failures are independent and come at a constant rate, that every
save costs the same, and that a failure loses all steps since the last save.

- J. W. Young: A first order approximation to the optimum checkpoint interval. Communications of the ACM 17(9), 1974.
- J. T. Daly: A higher order estimate of the optimum checkpoint interval for restart dumps. Future Generation Computer
  Systems 22(3), 2006, equation 37.

The rate starts from a published one: Llama 3's training had 419 unexpected interruptions in 54 days on 16,384 GPUs,
2,048 nodes with 8 GPUs each, so one in 6,335 node hours (The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4).
Observed runs are added. The prior is a mixture of Gamma distributions, each with the weight of one failure: the
published rate, and 10, 100 and 1,000 times that, each ten times worse one a hundred times less likely. So no failure
so far does not mean that none will come, four failures in an hour replace the published rate at once, and a single
one does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

HOUR = 3600.0
PUBLISHED_NODE_HOURS = 54 * 24 * 2048 / 419  # for each failure
_WORSE = (1, 10, 100, 1000)  # times the published rate
LEAST = 10.0  # seconds between saves; agents look once a second, and a trainer saves after its step
_LONGEST = 1e9  # seconds


class Failures(NamedTuple):
    """Observed failures, and the node hours in which they were observed."""

    seen: float = 0.0
    node_hours: float = 0.0

    def plus(self, seen: float, node_hours: float) -> "Failures":
        """With more observations."""
        return Failures(self.seen + seen, self.node_hours + node_hours)

    def rate(self) -> float:
        """Expected failures per node hour: the mean of the posterior, see the module."""
        hours = max(0.0, self.node_hours)
        seen = self.seen if hours else 0.0
        chances, rates = [], []
        for worse in _WORSE:
            prior = PUBLISHED_NODE_HOURS / worse
            chance = -2 * math.log(worse) + math.log(prior / (prior + hours))
            chances.append(chance + (seen * math.log(hours / (prior + hours)) if seen else 0.0))
            rates.append((1.0 + seen) / (prior + hours))
        weights = [math.exp(chance - max(chances)) for chance in chances]
        return sum(weight * rate for weight, rate in zip(weights, rates)) / sum(weights)  # noqa: B905 - Python 3.8


NONE = Failures()


def time_between_failures(nodes: int, failures: Failures) -> float:
    """Expected seconds between two failures of a run on so many nodes.

    Raises:
        ValueError: no nodes.
    """
    if nodes < 1:
        raise ValueError("a run on %d nodes" % nodes)
    return HOUR / (failures.rate() * nodes)


def best_interval(cost: float, between: float) -> float:
    """Seconds of training between two saves that lose least time (Daly's equation 37).

    Args:
        cost: seconds for which a save stops the training.
        between: seconds between two failures.

    Raises:
        ValueError: a cost or a time that is negative, zero or no number.
    """
    for name, value in (("cost of a save", cost), ("time between failures", between)):
        if not (math.isfinite(value) and 0 < value <= _LONGEST):
            raise ValueError("the %s must be a positive number of seconds, not %r" % (name, value))
    if cost >= 2 * between:
        return between
    share = cost / (2 * between)
    return max(LEAST, cost, math.sqrt(2 * cost * between) * (1 + math.sqrt(share) / 3 + share / 9) - cost)


def loss(interval: float, cost: float, between: float) -> float:
    """The share of the time that saves and repeated steps take together, to first order; at most 1."""
    return min(1.0, cost / (interval + cost) + (interval + cost) / (2 * between))


def too_short(interval: float, cost: Optional[float]) -> Optional[str]:
    """Why an interval cannot be used: it is shorter than a save, or than ``LEAST``. None if it can."""
    if not math.isfinite(interval) or interval < LEAST:
        return "an interval must be at least %d s" % LEAST
    if cost is not None and interval <= cost:
        return "an interval of %.3g s is shorter than a save, which takes %.3g s" % (interval, cost)
    return None
