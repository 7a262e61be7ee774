"""The range of a number, declared once beside its option and used for the command line, files and ``--help``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple, Union

Number = Union[int, float]
LONG = 24  # digits of a number to show
SAFETY = 1_000_000  # a higher limit only guards against typing errors: shown only with a value above it


@dataclass(frozen=True)
class Bound:
    """A range, and single values outside it with a special meaning.

    Attributes:
        low: the lowest value; None: no limit.
        high: the highest value; None: no limit.
        above: the value must be larger than this one.
        below: the value must be smaller than this one.
        also: allowed values outside the range, such as 0 for "never".
    """

    low: Optional[Number] = None
    high: Optional[Number] = None
    above: Optional[Number] = None
    below: Optional[Number] = None
    also: Tuple[Number, ...] = ()

    def allows(self, value: Number) -> bool:
        """Whether the value is finite and inside the range, or one of ``also``."""
        if value in self.also:
            return True
        return (
            (isinstance(value, int) or math.isfinite(value))  # a float cannot hold a large whole number
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """``at least 1``, ``more than 0 and at most 1``, ``at least 1, or 0``; ``a finite number`` without limits."""
        high = None if self.high is not None and self.high > SAFETY else self.high
        return self._describe(high)

    def problem(self, value: Number) -> str:
        """``must be at least 1, not -3``; empty for an allowed value."""
        if self.allows(value):
            return ""
        is_too_high = self.high is not None and value > self.high
        return "must be %s, not %s" % (self._describe(self.high) if is_too_high else self, _shown(value))

    def _describe(self, high: Optional[Number]) -> str:
        limits = (("at least", self.low), ("more than", self.above), ("at most", high), ("less than", self.below))
        text = " and ".join("%s %s" % (word, _shown(limit)) for word, limit in limits if limit is not None)
        return ", or ".join([text or "a finite number", *map(_shown, self.also)])


def _shown(value: Number) -> str:
    text = "%d" % value if isinstance(value, int) else "%g" % value
    return text if len(text) <= LONG else "%s... (%d digits)" % (text[:LONG], len(text.lstrip("-")))


COUNT = Bound(low=1, high=1 << 40)
"""A number of things, at least one."""
EVERY = Bound(low=1, high=1 << 40, also=(0,))
"""An interval in steps, where 0 means never."""
SHARE = Bound(low=0, high=1)
RATE = Bound(above=0, high=1e3)
