"""The type of a rule, functions that read a run's progress and samples, and robust statistics over short series."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Event, Evidence


@dataclass(frozen=True)
class Limit:
    """A threshold and the reason for it."""

    value: float
    why: str


@dataclass(frozen=True)
class Rule:
    """A problem that a training can have.

    Attributes:
        id: ``subject.word``; stable.
        title: the problem, for docs/troubleshooting.md.
        look: yields a sentence for each place with the problem.
        fix: what to do, the most useful step first.
        limits: the thresholds by name.
        leads: whether the problem can cause a failure.
    """

    id: str
    title: str
    look: Callable[[Evidence, Mapping[str, Limit]], Iterable[str]]
    fix: tuple[str, ...]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    leads: bool = False


@dataclass(frozen=True)
class Condition:
    """A problem that a rule found, and its fix."""

    id: str
    says: tuple[str, ...]
    fix: tuple[str, ...]
    leads: bool = False


def steps(evidence: Evidence) -> list[Event]:
    """The run's progress by step, from the node with the most steps. Of a repeated step the last report counts."""
    best: dict[int, Event] = {}
    for record in evidence.records:
        found: dict[int, Event] = {}
        for event in record.events:
            if event.get("event") == "progress" and isinstance(event.get("step"), int):
                known = found.get(event["step"], {})
                found[event["step"]] = {**known, **{key: value for key, value in event.items() if value is not None}}
        best = max(best, found, key=len)
    return [best[step] for step in sorted(best)]


def series(events: Iterable[Event], name: str) -> list[float]:
    """The finite numbers of a field, in order."""
    return [float(value) for event in events if isinstance(value := event.get(name), int | float)]


def numbers(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers of a field, without rows that lack it."""
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def rates(samples: Iterable[Event]) -> Iterator[tuple[str, list[float]]]:
    """Each interface and port with its rates in bytes per second, each the larger of both directions."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for kind in ("network", "infiniband"):
            for name, way in (sample.get(kind) or {}).items():
                if isinstance(way, dict):
                    both = [value for value in (way.get("in"), way.get("out")) if isinstance(value, int | float)]
                    found.setdefault(name, []).extend([max(both)] if both else [])
    yield from found.items()


# --- statistics -----------------------------------------------------------------------------------


def rolling(values: Sequence[float], width: int) -> list[float]:
    """The median of every window of ``width`` values."""
    return [median(values[start : start + width]) for start in range(len(values) - width + 1)]


def noise(values: Sequence[float]) -> float:
    """The standard deviation of the values around their trend.

    Uses the median of the absolute differences, which a few spikes do not change. For normal noise this median is 0.954
    of the standard deviation (0.6745 times the square root of 2).
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
    """The value below which the share ``part`` of all values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
