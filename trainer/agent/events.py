"""The run's events on this node: ``events.jsonl``, one JSON object per line, only appended to.

A full disk ends the log, not the run. Log lines and progress are dropped then, and counted. All other events are kept
in memory (at most ``KEPT``) and written when there is room again. Log lines that would fill the disk are dropped too;
``run.log`` has all of them.
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
KEPT = 100  # events that wait for free space on the disk
BURST = 4 << 20  # bytes of log lines at once
RATE = 256 << 10  # bytes of log lines per second in the long run

_PASSING = ("log", "progress")


class Events:
    """Writes the events. ``attempt`` is part of every event; ``echo`` is a descriptor that gets a copy."""

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
        """Bytes in the file, including those of earlier attempts and agents."""
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
            except OSError:  # the reader has closed it
                self._echo = None

    def close(self) -> None:
        """Write the waiting events, if there is room, and close the file."""
        while self._kept and self._write(self._kept[0]):
            self._kept.popleft()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _line(self, event: str, fields: Dict[str, Any]) -> bytes:
        record = dict(event=event, time=round(time.time(), 3), attempt=self.attempt, **fields)
        return json.dumps(record).encode() + b"\n"

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
            data = b"\n" + data  # readers skip the incomplete line
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                self._torn = True
                os.write(self._fd, data[written:])  # the rest, or the error
        except OSError:
            return False
        self._torn = False
        return True
