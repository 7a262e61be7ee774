"""Searches for the fastest of NCCL's socket settings, with a bounded number of measurements. Pure except ``measure``.

NCCL's documentation (Environment Variables: NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD) allows 16 threads, and 64
sockets in all for a connection. NCCL_MIN_NCHANNELS is the least number of rings; each has its own connections.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS = "NCCL_NSOCKS_PERTHREAD"
CHANNELS = "NCCL_MIN_NCHANNELS"
NAMES = (THREADS, SOCKETS, CHANNELS)
WORTH = 1.05  # times the present setting: a smaller gain is not worth a change
BETTER = 1.03  # times the best so far: a smaller gain may be chance
MOST = 24  # settings to try
_PATIENCE = 2  # settings in a row without a gain until a direction is abandoned
_MOST_THREADS, _MOST_SOCKETS, _MOST_CHANNELS = 16, 64, 32


@dataclass(frozen=True)
class Setting:
    """A value for each of ``NAMES``; None leaves it to NCCL."""

    threads: int | None = None
    sockets: int | None = None
    channels: int | None = None

    @property
    def env(self) -> dict[str, str]:
        """The variables that are set."""
        values = zip(NAMES, (self.threads, self.sockets, self.channels), strict=True)
        return {name: str(value) for name, value in values if value is not None}

    @property
    def allowed(self) -> bool:
        """Whether NCCL accepts the setting."""
        threads, sockets, channels = self.threads or 1, self.sockets or 1, self.channels or 1
        return threads <= _MOST_THREADS and threads * sockets <= _MOST_SOCKETS and channels <= _MOST_CHANNELS

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Setting:
        """The setting in an environment; like NCCL, it ignores values that are not positive whole numbers."""
        return cls(*(int(value) if (value := env.get(name, "")).isdecimal() and int(value) else None for name in NAMES))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items()) or "NCCL's defaults"


Measure = Callable[[Setting], float | None]  # bytes a second; None if the setting does not work


@dataclass(frozen=True)
class Tuning:
    """The result of the search. Bandwidths are bytes a second.

    Attributes:
        default: the bandwidth with NCCL's defaults.
        present: the inventory's setting, with ``present_busbw``.
        best: the fastest setting, with ``best_busbw``; all three were measured again after the search.
        tried: every setting with its first bandwidth; None if it failed.
    """

    default: float
    present: Setting
    present_busbw: float
    best: Setting
    best_busbw: float
    tried: tuple[tuple[Setting, float | None], ...]

    @property
    def factor(self) -> float:
        """The ratio of the best setting to the defaults."""
        return self.best_busbw / self.default

    @property
    def gain(self) -> float:
        """The ratio of the best setting to the present one; infinite if that did not work."""
        return self.best_busbw / self.present_busbw if self.present_busbw else math.inf

    @property
    def worth_it(self) -> bool:
        """Whether the best setting should replace the present one."""
        return self.best != self.present and self.gain >= WORTH


def search(measure: Measure, present: Setting) -> Tuning:
    """Find the fastest setting, starting from the faster of NCCL's defaults and the present setting.

    First each value is doubled until that gains nothing, one after the other; then all are halved and doubled around
    the best until none of these is better. At the end the best, the defaults and the present setting are measured
    again, so that a lucky first measurement decides nothing.

    Args:
        measure: measures a setting.
        present: the inventory's setting.

    Raises:
        ValueError: even NCCL's defaults do not work.
    """
    tried: dict[Setting, float | None] = {}

    def rate(setting: Setting) -> float:
        if setting not in tried:
            tried[setting] = measure(setting)
        return tried[setting] or 0.0

    default = Setting()
    if not rate(default):
        raise ValueError("NCCL's defaults could not be measured")
    best = max((default, present), key=rate)
    for axis in ("threads", "sockets", "channels"):
        best = _double(rate, best, axis)
    better: Setting | None = best
    while better is not None and len(tried) < MOST:
        best = better
        better = next((each for each in _around(best) if len(tried) < MOST and rate(each) > rate(best) * BETTER), None)
    best = better or best

    def again(setting: Setting) -> float:
        return statistics.mean((rate(setting), measure(setting) or 0.0))

    final = {each: again(each) for each in dict.fromkeys((default, present, best))}
    return Tuning(final[default], present, final[present], best, final[best], tuple(tried.items()))


def _double(rate: Callable[[Setting], float], start: Setting, axis: str) -> Setting:
    """Double one value as long as that helps."""
    best, failed = start, 0
    setting = start
    while failed < _PATIENCE:
        setting = _scaled(setting, axis, 2)
        if not setting.allowed:
            break
        if rate(setting) > rate(best) * BETTER:
            best, failed = setting, 0
        else:
            failed += 1
    return best


def _around(setting: Setting) -> Iterator[Setting]:
    """The settings next to one, each with one value doubled or halved, or threads traded for sockets."""
    for axis, other in (("threads", "sockets"), ("sockets", "threads")):
        yield from _allowed(_scaled(_scaled(setting, axis, 2), other, 0.5))
    for axis in ("channels", "threads", "sockets"):
        for factor in (2, 0.5):
            yield from _allowed(_scaled(setting, axis, factor))


def _allowed(setting: Setting) -> Iterator[Setting]:
    if setting.allowed:
        yield setting


def _scaled(setting: Setting, axis: str, factor: float) -> Setting:
    """One value doubled or halved. NCCL's default counts as one, except for channels, of which it has at least two."""
    least = 2 if axis == "channels" else 1
    value = int((getattr(setting, axis) or least) * factor)
    return replace(setting, **{axis: value if value > least else None})
