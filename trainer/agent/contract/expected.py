"""The expected band of a run: what its step time, throughput and memory should be, and how that is known.

The controller puts it into the plan, and rank 0's agent judges the run by it (``pace.py``) and writes it into
``state.json``, where ``status``, ``monitor`` and ``report`` find it. ``{"version": 1, "basis": "…",
"step_seconds": [low, high], "tokens_per_second": [low, high], "memory_bytes": [low, high]}``; an unknown range is null.
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

from .untrusted import UntrustedError, is_number

VERSION = 1
BASIS = 300  # characters
LARGEST = 1e18
RANGES = ("step_seconds", "tokens_per_second", "memory_bytes")

Range = Tuple[float, float]


class Expected(NamedTuple):
    """What is expected of a run.

    Attributes:
        basis: where the ranges come from; without any, why there is none.
        step_seconds: the time of an optimizer step, without evaluations and checkpoints.
        tokens_per_second: of all GPUs together.
        memory_bytes: of the fullest GPU of rank 0's node, as nvidia-smi shows it.
    """

    basis: str = ""
    step_seconds: Optional[Range] = None
    tokens_per_second: Optional[Range] = None
    memory_bytes: Optional[Range] = None

    @property
    def known(self) -> bool:
        """Whether there is any range."""
        return any(each is not None for each in self[1:])

    def to_object(self) -> Dict[str, Any]:
        """The band as plain JSON values."""
        ranges = {name: each and list(each) for name, each in zip(RANGES, self[1:])}  # noqa: B905 - Python 3.8
        return dict(ranges, version=VERSION, basis=self.basis)


def from_object(value: Any) -> Expected:
    """Read a band.

    Raises:
        UntrustedError: it is no band of this version; the text names the key.
    """
    if not isinstance(value, dict):
        raise UntrustedError("must be an object")
    if value.get("version") != VERSION or isinstance(value.get("version"), bool):
        raise UntrustedError("version is %.20r, but only version %d is supported" % (value.get("version"), VERSION))
    unknown = sorted(set(value) - {"version", "basis", *RANGES})
    if unknown:
        raise UntrustedError("%.60s is not a known key" % unknown[0])
    basis = value.get("basis", "")
    if not isinstance(basis, str) or len(basis) > BASIS:
        raise UntrustedError("basis must be text of at most %d characters" % BASIS)
    return Expected(basis, *(_range(name, value.get(name)) for name in RANGES))


def read(value: Any) -> Optional[Expected]:
    """The band in a state or a record; None if there is none that can be read."""
    try:
        return from_object(value)
    except UntrustedError:
        return None


def _range(name: str, value: Any) -> Optional[Range]:
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value)) and value[0] <= value[1]:
        return float(value[0]), float(value[1])
    raise UntrustedError("%s must be two positive numbers, the lower one first" % name)


def _is_number(value: Any) -> bool:
    return is_number(value) and 0 < value <= LARGEST
