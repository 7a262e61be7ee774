"""Robust statistics over short series. Pure; those of the standard library are for clean data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median


def rolling(values: Sequence[float], width: int) -> list[float]:
    """The median of every window of ``width`` values."""
    return [median(values[start : start + width]) for start in range(len(values) - width + 1)]


def noise(values: Sequence[float]) -> float:
    """The standard deviation of the values around their trend.

    It is based on the median of the absolute differences, which a few spikes do not change. For normal noise this
    median is 0.954 of the standard deviation (0.6745 times the square root of 2).
    """
    steps = [abs(after - before) for before, after in itertools.pairwise(values)]
    return median(steps) / 0.954 if steps else 0.0


def slope(values: Sequence[float]) -> tuple[float, float]:
    """The least-squares slope per index, and the slope over its standard error (Student's t)."""
    count = len(values)
    middle, level = (count - 1) / 2, fmean(values)
    spread = sum((place - middle) ** 2 for place in range(count))
    found = sum((place - middle) * (value - level) for place, value in enumerate(values)) / spread
    rest = sum((value - level - found * (place - middle)) ** 2 for place, value in enumerate(values))
    error = math.sqrt(rest / max(count - 2, 1) / spread)
    return found, found / error if error else math.copysign(math.inf, found) if found else 0.0


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which the share ``part`` of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
