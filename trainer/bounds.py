"""The values that a number may take, declared once beside the option: for the command line, files and ``--help``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple, Union

Number = Union[int, float]
LONG = 24  # digits of a number that are shown


@dataclass(frozen=True)
class Bound:
    """A range, and single values beside it that mean something of their own.

    Attributes:
        low: the lowest value; None: no limit.
        high: the highest value; None: no limit.
        above: the value must be larger than this one.
        below: the value must be smaller than this one.
        also: values outside the range that are allowed too, such as 0 for "never".
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
            (isinstance(value, int) or math.isfinite(value))  # a large whole number fits into no float
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """``at least 1``, ``more than 0 and at most 1``, ``at least 1, or 0``; ``a finite number`` without limits."""
        parts = []
        for word, limit in (
            ("at least", self.low),
            ("more than", self.above),
            ("at most", self.high),
            ("less than", self.below),
        ):
            if limit is not None:
                parts.append("%s %s" % (word, _shown(limit)))
        text = " and ".join(parts) or "a finite number"
        return ", or ".join([text, *map(_shown, self.also)])

    def problem(self, value: Number) -> str:
        """``must be at least 1, not -3``; empty where the value is allowed."""
        return "" if self.allows(value) else "must be %s, not %s" % (self, _shown(value))


def _shown(value: Number) -> str:
    text = "%d" % value if isinstance(value, int) else "%g" % value
    return text if len(text) <= LONG else "%s... (%d digits)" % (text[:LONG], len(text.lstrip("-")))


COUNT = Bound(low=1, high=1 << 40)
"""Of things of which there must be one."""
EVERY = Bound(low=1, high=1 << 40, also=(0,))
"""An interval in steps, where 0 means never."""
SHARE = Bound(low=0, high=1)
RATE = Bound(above=0, high=1e3)
