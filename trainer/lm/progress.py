"""The progress of encoding, on stderr."""

from __future__ import annotations

import sys
import time

QUIET = 2.0  # seconds until the first line of progress


class Progress:
    """Progress on stderr after two seconds: one line that updates on a terminal, else a line every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = self._skipped = 0
        self._began = time.monotonic()
        self._next = QUIET
        self._pause = 1.0 if sys.stderr.isatty() else 10.0
        self._shown = False

    def add(self, size: int) -> None:
        """Count encoded bytes."""
        self._done += size
        spent = time.monotonic() - self._began
        if spent < self._next:
            return
        self._next = spent + self._pause
        self._shown = True
        self._write(describe(self._done, self._total - self._skipped, spent))

    def skip(self, size: int) -> None:
        """Count bytes that were encoded earlier."""
        self._skipped += size

    def close(self) -> None:
        """End the line that updates."""
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\n")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r%s\x1b[K" % text if sys.stderr.isatty() else text + "\n")
        sys.stderr.flush()


def describe(done: int, total: int, spent: float) -> str:
    """``encoded 12 of 120 MiB (10 %), 3.2 MiB/s, 0:00:34 left``."""
    speed = done / spent
    left = round(max(0, total - done) / speed)
    share = 100 * done / max(1, total)
    clock = "%d:%02d:%02d" % (left // 3600, left // 60 % 60, left % 60)
    sizes = (done / 2**20, total / 2**20, share, speed / 2**20, clock)
    return "encoded %.0f of %.0f MiB (%.0f %%), %.1f MiB/s, %s left" % sizes
