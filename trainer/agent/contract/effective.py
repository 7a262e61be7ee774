"""The effective training time of a run: where its time went, as ``spent`` in ``state.json`` and in the event ``end``.

Every agent keeps the account (``account.py``). ``{"version": 1, "training": 5230.1, "starting": 61.0, …}``: seconds
and counts. The parts add up to the total, and the ratio is the share of training. ``status``, ``collect``, ``monitor``,
``report`` and the run's record show it.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple, Optional, Tuple

from .untrusted import UntrustedError, is_number, is_whole

VERSION = 1
PARTS = ("training", "starting", "saving", "recovering", "repeating", "waiting")
_COUNTS = ("saves", "restarts", "failures", "repeated")
_LONGEST = 1e10  # seconds
_MOST = 1 << 53  # steps


class Effective(NamedTuple):
    """Where the time of a run went, over all of its attempts and resumes. Times are seconds.

    Attributes:
        training: steps for the first time, with evaluations.
        starting: before the first step of a start, and after the last one.
        saving: while a save stopped the training.
        recovering: from the last step before a failure to the failure, and from the next start to its first step.
        repeating: steps made again after a restart, because the checkpoint was older.
        waiting: the pause before a restart, the meeting of the nodes, and silence of other nodes.
        stopped: while the run lay stopped before a resume; no part of the total.
        saves: how many saves there were.
        restarts: how many attempts failed and were followed by another one.
        failures: failures after at least one step of the attempt, so that no wrong option is counted.
        repeated: steps made again.
        top: the highest step; None before the first one.
        pace: seconds per step, the median; None if unknown.
    """

    training: float = 0.0
    starting: float = 0.0
    saving: float = 0.0
    recovering: float = 0.0
    repeating: float = 0.0
    waiting: float = 0.0
    stopped: float = 0.0
    saves: int = 0
    restarts: int = 0
    failures: int = 0
    repeated: int = 0
    top: Optional[int] = None
    pace: Optional[float] = None

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return math.fsum(seconds for _, seconds in self.parts())

    @property
    def ratio(self) -> Optional[float]:
        """The share of training, from 0 to 1; None if the run has reported no step and announced no training."""
        total = self.total
        if total <= 0 or (self.top is None and not self.training):
            return None
        return min(1.0, self.training / total)

    @property
    def save_cost(self) -> Optional[float]:
        """Seconds for which one save stops the training; None without a save."""
        return self.saving / self.saves if self.saves else None

    def parts(self) -> Tuple[Tuple[str, float], ...]:
        """The parts by name, training first."""
        return tuple((name, float(getattr(self, name))) for name in PARTS)

    def to_object(self) -> Dict[str, Any]:
        """The account as plain JSON values."""
        values = {
            name: round(min(value, _LONGEST), 3) if isinstance(value, float) else value  # a clock may jump
            for name, value in self._asdict().items()
        }
        return dict(values, version=VERSION)


def from_object(value: Any) -> Effective:
    """Read an account.

    Raises:
        UntrustedError: it is no account of this version; the text names the key.
    """
    if not isinstance(value, dict):
        raise UntrustedError("must be an object")
    if value.get("version") != VERSION or isinstance(value.get("version"), bool):
        raise UntrustedError("version is %.20r, but only version %d is supported" % (value.get("version"), VERSION))
    found: Dict[str, Any] = {}
    for name in (*PARTS, "stopped"):
        found[name] = _seconds(name, value.get(name, 0.0))
    for name in _COUNTS:
        found[name] = _count(name, value.get(name, 0))
    top, pace = value.get("top"), value.get("pace")
    return Effective(
        top=None if top is None else _count("top", top), pace=None if pace is None else _seconds("pace", pace), **found
    )


def read(value: Any) -> Optional[Effective]:
    """The account in a state, an event or a record; None if there is none that can be read: an older run has none."""
    try:
        return from_object(value)
    except UntrustedError:
        return None


def _seconds(name: str, value: Any) -> float:
    if not is_number(value, least=0.0) or value > _LONGEST:
        raise UntrustedError("%s must be seconds from 0 to %g" % (name, _LONGEST))
    return float(value)


def _count(name: str, value: Any) -> int:
    if not is_whole(value, _MOST):
        raise UntrustedError("%s must be a whole number" % name)
    return int(value)
