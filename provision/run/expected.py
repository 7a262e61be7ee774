"""Where the expected band of a run comes from: a user's numbers, or an earlier run's measurement. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from provision.errors import UsageError
from trainer.agent.contract.expected import LARGEST, Expected, Range

MARGIN = 0.10  # beside an earlier run's median: equal jobs on equal nodes differ by less
_NUMBERS = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)-([0-9]{1,9}(?:\.[0-9]{1,9})?)")


def typed_band(text: str) -> Expected | None:
    """The band of ``LOW-HIGH``, in seconds per step; None for other text, such as a run's id.

    Raises:
        UsageError: it is no band.
    """
    match = _NUMBERS.fullmatch(text)
    if match is None:
        return None
    low, high = float(match[1]), float(match[2])
    if not 0 < low <= high:
        raise UsageError(f"--expected {text}: the lower number must be first, and above 0", hint="--expected 0.4-0.6")
    return Expected("given by --expected", step_seconds=(low, high))


def measured_band(run: str, measured: object) -> Expected:
    """The band of an earlier run: its medians with a margin, or what it measured if that is wider.

    Args:
        run: its id.
        measured: the low, median and high values in its ``state.json``.

    Raises:
        UsageError: it has no measurement.
    """
    known = measured if isinstance(measured, Mapping) else {}
    step, tokens, memory = (_wider(known.get(name)) for name in ("step_seconds", "tokens_per_second", "memory_bytes"))
    if step is None:
        raise UsageError(
            f"--expected {run}: this run has no measured step time",
            hint="its steps must be in its log for about half a minute; or give seconds per step: --expected 0.4-0.6",
        )
    return Expected(f"measured in {run}"[:200], step, tokens, memory)


def _wider(value: Any) -> Range | None:
    numbers = value if isinstance(value, list) and len(value) == 3 else ()
    if not numbers or not all(type(each) in {int, float} and 0 < each < LARGEST / 2 for each in numbers):
        return None
    low, middle, high = sorted(numbers)
    return min(low, middle * (1 - MARGIN)), max(high, middle * (1 + MARGIN))
