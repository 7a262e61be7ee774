"""Lines and bytes over one blocking socket that is for files; see ``copying.py`` for what is said."""

from __future__ import annotations

import functools
import json
import socket
import time
from typing import Any, Callable, Dict, Optional

LINE = 64 << 10  # bytes of a line
SILENCE = 60.0  # seconds without a byte after which a copy has failed
LOOK = 0.5  # seconds between questions whether to go on


class CopyError(Exception):
    """A file could not be copied. The text says which, and why."""


class Stream:
    """Lines and bytes over one socket that blocks. ``alive`` is asked while it waits.

    Raises, from every method:
        CopyError: the other side has ended or is silent, or ``alive`` says no.
    """

    def __init__(self, sock: socket.socket, alive: Callable[[], bool] = lambda: True) -> None:
        sock.settimeout(LOOK)
        self.sock = sock
        self._alive = alive
        self._come = bytearray()

    def say(self, message: Dict[str, Any]) -> None:
        """Send one message."""
        self.write(memoryview(json.dumps(message).encode() + b"\n"))

    def write(self, data: memoryview) -> None:
        """Send all of ``data``."""
        while data:
            count = self._patiently(functools.partial(self.sock.send, data))
            data = data[count:]

    def hear(self) -> Optional[Dict[str, Any]]:
        """The next message; None at the end."""
        while True:
            line, newline, rest = self._come.partition(b"\n")
            if newline:
                self._come = rest
                try:
                    message = json.loads(line.decode("utf-8"))
                except ValueError:
                    message = None
                if not isinstance(message, dict):
                    raise CopyError("what came is no answer")
                return message
            if len(line) > LINE:
                raise CopyError("what came is no answer")
            piece = bytearray(LINE)
            count = self._receive(memoryview(piece))
            if not count:
                return None
            self._come += piece[:count]

    def read_into(self, view: memoryview) -> int:
        """Fill the beginning of ``view``. The number of bytes; 0 at the end."""
        if self._come:
            count = min(len(view), len(self._come))
            view[:count] = self._come[:count]
            del self._come[:count]
            return count
        return self._receive(view)

    def _receive(self, view: memoryview) -> int:
        return self._patiently(functools.partial(self.sock.recv_into, view))

    def _patiently(self, work: Callable[[], int]) -> int:
        """Do ``work`` as soon as the socket is ready for it."""
        limit = time.monotonic() + SILENCE
        while time.monotonic() < limit:
            if not self._alive():
                raise CopyError("it was given up")
            count = _once(work)
            if count is not None:
                return count
        raise CopyError("no byte came or went in %d s" % SILENCE)


def _once(work: Callable[[], int]) -> Optional[int]:
    try:
        return work()
    except socket.timeout:
        return None
    except OSError as error:
        raise CopyError("the connection broke: %s" % error) from error
