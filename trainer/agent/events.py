"""Events to the controller: JSON lines on stdout that can never hold up the run.

A controller that stops reading must not stop the training, and its going away must not raise here: a thread of
its own writes, and what waits to be written is bounded. When it grows too long the oldest *log* lines go.
"""

from __future__ import annotations

import collections
import json
import os
import select
import threading
import time
from typing import Any, Callable, Deque, Dict, Tuple

WAITING = 4 << 20  # bytes that may wait for a slow reader
BATCH = 64 << 10  # bytes in one write


def _line(event: str, fields: Dict[str, Any]) -> bytes:
    return json.dumps(dict(event=event, time=round(time.time(), 3), **fields)).encode() + b"\n"


class Events:
    """The way out. ``broken`` is true once nobody reads any more; ``on_broken`` is called then, from the thread."""

    def __init__(self, fd: int, on_broken: Callable[[], None]) -> None:
        self.broken = False
        self._fd = fd
        self._on_broken = on_broken
        self._waiting: Deque[Tuple[bytes, bool]] = collections.deque()
        self._size = 0
        self._dropped = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="events", daemon=True)

    def emit(self, event: str, **fields: Any) -> None:
        """Queue one event. The first one starts the thread: the command must have been forked before that."""
        if self._thread.ident is None:
            self._thread.start()
        line = _line(event, fields)
        with self._changed:
            if self.broken:
                return
            self._waiting.append((line, event == "log"))
            self._size += len(line)
            while self._size > WAITING and self._drop():
                pass
            self._changed.notify()

    def close(self, patience: float) -> None:
        """Write what waits, for at most ``patience`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(patience)

    def _drop(self) -> bool:
        for index, (line, droppable) in enumerate(self._waiting):
            if droppable:
                del self._waiting[index]
                self._size -= len(line)
                self._dropped += 1
                return True
        return False

    def _take(self) -> bytes:
        """The next bytes to write; empty at the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            batch = []
            size = 0
            if self._dropped:
                batch.append(_line("dropped", {"lines": self._dropped}))
                self._dropped = 0
            while self._waiting and size < BATCH:
                line, _ = self._waiting.popleft()
                self._size -= len(line)
                size += len(line)
                batch.append(line)
            return b"".join(batch)

    def _write_all(self) -> None:
        try:
            while True:
                data = memoryview(self._take())
                if not data:
                    return
                while data:
                    select.select([], [self._fd], [])  # in case somebody made it non-blocking
                    data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]
        except (OSError, ValueError):
            with self._changed:
                self.broken = True
                self._waiting.clear()
                self._size = 0
            self._on_broken()
