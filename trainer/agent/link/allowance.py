"""How much one agent may send: an agent of the run that is broken or lies must not fill the others' memory."""

from __future__ import annotations

BURST = 32 << 20  # bytes at once; the largest message has 16 MiB
RATE = 4 << 20  # bytes in a second, all the time
LEAST = 16 << 10  # bytes that a message counts for: every one is relayed to all others


class Allowance:
    """A bucket of bytes that fills with time."""

    def __init__(self) -> None:
        self._room = float(BURST)
        self._at = 0.0

    def take(self, size: int, now: float) -> bool:
        """Whether a message of this size may pass now; it is counted if so."""
        self._room = min(float(BURST), self._room + (now - self._at) * RATE)
        self._at = now
        size = max(size, LEAST)
        if size > self._room:
            return False
        self._room -= size
        return True
