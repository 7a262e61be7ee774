"""The run's events on this node: ``events.jsonl``, appended to, one JSON object a line.

A full disk ends the log and not the run: log lines and progress are dropped then and counted, all other events are
kept in memory (a few) and written when there is room again. So many log lines that they would fill the disk are
dropped as well; ``run.log`` has them all.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Deque, Dict, Optional

NAME = "events.jsonl"
KEPT = 100  # events that wait for room on the disk
BURST = 4 << 20  # bytes of log lines at once,
RATE = 256 << 10  # and in a second when they never end

_PASSING = ("log", "progress")


class Events:
    """The way out. ``attempt`` goes into every event; ``echo`` is a descriptor that gets a copy."""

    def __init__(self, logs: Path, echo: Optional[int] = None) -> None:
        self.attempt = 0
        self._fd = os.open(logs / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._echo = echo
        self._kept: Deque[bytes] = collections.deque(maxlen=KEPT)
        self._torn = False  # the disk took only a part of the last line
        self._dropped = 0
        self._room = float(BURST)
        self._at = time.monotonic()

    def size(self) -> int:
        """Bytes written so far, in all attempts and by whoever was here before."""
        return os.fstat(self._fd).st_size

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event."""
        data = self._line(event, fields)
        if event == "log" and not self._has_room(len(data)):
            self._dropped += 1
            return
        while self._kept and self._write(self._kept[0]):
            self._kept.popleft()
        if self._dropped and not self._kept and self._write(self._line("dropped", {"lines": self._dropped})):
            self._dropped = 0
        if self._kept or not self._write(data):
            if event in _PASSING:
                self._dropped += 1
            else:
                self._kept.append(data)
        if self._echo is not None:
            try:
                os.write(self._echo, data)
            except OSError:  # nobody reads any more
                self._echo = None

    def close(self) -> None:
        """Write what waits, if there is room, and close the file."""
        while self._kept and self._write(self._kept[0]):
            self._kept.popleft()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _line(self, event: str, fields: Dict[str, Any]) -> bytes:
        said = dict(event=event, time=round(time.time(), 3), attempt=self.attempt, **fields)
        return json.dumps(said).encode() + b"\n"

    def _has_room(self, size: int) -> bool:
        now = time.monotonic()
        self._room = min(BURST, self._room + (now - self._at) * RATE) - size
        self._at = now
        if self._room < 0:
            self._room += size
            return False
        return True

    def _write(self, data: bytes) -> bool:
        if self._torn:
            data = b"\n" + data  # readers skip the line that is none
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                self._torn = True
                os.write(self._fd, data[written:])  # the rest, or why it cannot be
        except OSError:
            return False
        self._torn = False
        return True
