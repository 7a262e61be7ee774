"""The speed of copies in the background: a small share of the network, so that they do not slow the training.

A copy measures the connection with its first ``BURST`` bytes, and continues at ``SHARE`` of the highest speed that was
measured so far. A training that needs all of the network loses at most that share. While the training uses it, less
is measured, so the copy is slower. ``--copies-rate`` replaces the measurement.
"""

from __future__ import annotations

import time
from typing import Callable, Optional

BURST = 8 << 20  # bytes
SHARE = 0.04  # of the connection's speed
LEAST = 1 << 20  # bytes per second: a slow network is no reason to copy for days


class Pacer:
    """Limits the bytes per second of one node's copies. ``rate``: the user's limit; None: it is measured."""

    def __init__(self, rate: Optional[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given = rate
        self._best = 0.0  # bytes per second
        self._began = 0.0
        self._at = 0.0
        self._measured = -1  # bytes of the current measurement; -1: none has arrived
        self._measuring = False

    @property
    def rate(self) -> Optional[int]:
        """Bytes per second; None before the first measurement."""
        if self._given is not None:
            return self._given
        return max(LEAST, int(self._best * SHARE)) if self._best else None

    def begin(self) -> None:
        """Start a copy of several files, with a measurement."""
        self._measuring = self._given is None
        self._measured = -1
        self._at = self._clock()

    def pause(self, count: int) -> float:
        """The seconds to wait after ``count`` bytes have arrived."""
        now = self._clock()
        if self._measuring:
            if self._measured < 0:
                self._measured, self._began = 0, now  # the time before these bytes is the other side's
            else:
                self._measured += count
            if self._measured < BURST:
                self._at = now
                return 0.0
            self._best = max(self._best, self._measured / max(now - self._began, 1e-6))
            self._measuring = False
        rate = self.rate
        assert rate is not None
        self._at = max(self._at, now - 1.0) + count / rate  # a delay of the disk is not made up for by a burst
        return max(0.0, self._at - now)
