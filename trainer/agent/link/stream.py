"""Frames over one blocking socket that is for files; see ``copying.py`` for what is said."""

from __future__ import annotations

import functools
import socket
import time
from typing import Any, Callable, Dict, Optional

from link.frames import HEAD, MAC, NotOursError, Session, encode, length_of, parse

LINE = 64 << 10  # bytes of a message
PIECE = 1 << 20  # bytes of a file in one frame
SILENCE = 60.0  # seconds without a byte after which a copy has failed
LOOK = 0.5  # seconds between questions whether to go on


class CopyError(Exception):
    """A file could not be copied. The text says which, and why."""


class Stream:
    """Messages and pieces of files over one socket that blocks. ``alive`` is asked while it waits.

    Every frame has a MAC, see ``frames.py``: ``hear`` and ``read`` give only what the other end sent, in its order.

    Raises, from every method:
        CopyError: the other side has ended, is silent or does not keep to the protocol, or ``alive`` says no.
    """

    def __init__(self, sock: socket.socket, session: Session, alive: Callable[[], bool] = lambda: True) -> None:
        sock.settimeout(LOOK)
        self.sock = sock
        self.alive = alive
        self._session = session

    def say(self, message: Dict[str, Any]) -> None:
        """Send one message."""
        payload = encode(message)
        self._send(self._session.sent.head(payload) + payload)

    def write(self, piece: memoryview) -> None:
        """Send a frame with a piece of a file, at most ``PIECE`` bytes."""
        head = self._session.sent.head(piece)
        if len(piece) <= LINE:
            self._send(head + piece)
        else:
            self._send(head)
            self._send(piece)

    def hear(self) -> Optional[Dict[str, Any]]:
        """The next message; None at the end."""
        buffer = memoryview(bytearray(LINE))
        count = self.read(buffer)
        if count is None:
            return None
        try:
            return parse(buffer[:count])
        except NotOursError as error:
            raise CopyError("the other side %s" % error) from None

    def read(self, view: memoryview) -> Optional[int]:
        """The next frame's payload, into the beginning of ``view``. Its length; None at the end."""
        head = memoryview(bytearray(HEAD))
        count = self._fill(head)
        if not count:
            return None
        try:
            length = length_of(head, len(view))
            if count < HEAD or self._fill(view[:length]) < length:
                raise CopyError("the other side closed the connection in the middle of a frame")
            self._session.received.check(head[HEAD - MAC :], view[:length])
        except NotOursError as error:
            raise CopyError("the other side %s" % error) from None
        return length

    def _send(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self._patiently(functools.partial(self.sock.send, view)) :]

    def _fill(self, view: memoryview) -> int:
        """Read until ``view`` is full. The number of bytes; fewer only at the end."""
        size = len(view)
        while view:
            count = self._patiently(functools.partial(self.sock.recv_into, view))
            if not count:
                break
            view = view[count:]
        return size - len(view)

    def _patiently(self, work: Callable[[], int]) -> int:
        """Do ``work`` as soon as the socket is ready for it."""
        limit = time.monotonic() + SILENCE
        while time.monotonic() < limit:
            if not self.alive():
                raise CopyError("cancelled")
            count = _once(work)
            if count is not None:
                return count
        raise CopyError("no data moved for %d s" % SILENCE)


def _once(work: Callable[[], int]) -> Optional[int]:
    try:
        return work()
    except socket.timeout:
        return None
    except OSError as error:
        raise CopyError("the connection broke: %s" % error) from error
