"""JSON objects over TCP, one a line: a socket that never blocks, with bounded memory in both directions."""

from __future__ import annotations

import json
import socket
from typing import Any, Dict, List

MESSAGE = 16 << 20  # bytes of a line from somebody who has proved that he belongs to the run
READ = 256 << 10  # bytes read or written at a time


class EndedError(Exception):
    """The connection is no more. ``by_peer``: the other side's kernel closed or reset it, so the process is gone.

    Everything else (a timeout, no route) tells of the network and nothing of the process.
    """

    def __init__(self, text: str, by_peer: bool) -> None:
        super().__init__(text)
        self.by_peer = by_peer


class NotOursError(Exception):
    """What came is no line of this protocol."""


def frame(message: Dict[str, Any]) -> bytes:
    """The line that carries ``message``."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> Dict[str, Any]:
    """The message of a line.

    Raises:
        NotOursError: it is not a JSON object.
    """
    try:
        message = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise NotOursError("said %r" % line[:40])
    return message


class Connection:
    """One TCP connection, used by the one thread that looks after it."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.limit = limit  # bytes that a line may have
        self.out = bytearray()
        self._come = bytearray()

    def fileno(self) -> int:
        """For a selector."""
        return self.sock.fileno()

    def send(self, data: bytes) -> None:
        """Queue bytes; ``flush`` writes them."""
        self.out += data

    def flush(self) -> None:
        """Write what the kernel takes now.

        Raises:
            EndedError: the connection is no more.
        """
        try:
            while self.out:
                del self.out[: self.sock.send(self.out[:READ])]
        except BlockingIOError:
            return
        except OSError as error:
            raise _ended(error) from error

    def receive(self) -> List[Dict[str, Any]]:
        """The messages that have come. At most ``READ`` bytes are read, so that one peer cannot starve the others.

        Raises:
            EndedError: the connection is no more; messages that came before its end were given by earlier calls.
            NotOursError: no message, or one that is longer than ``limit``.
        """
        try:
            data = self.sock.recv(READ)
        except BlockingIOError:
            return []
        except OSError as error:
            raise _ended(error) from error
        if not data:
            raise EndedError("it closed the connection", by_peer=True)
        scanned = len(self._come)
        self._come += data
        messages = []
        start = 0
        end = self._come.find(b"\n", scanned)
        while end >= 0:
            if end - start > self.limit:
                raise NotOursError("sent a line of %d bytes" % (end - start))
            messages.append(parse(bytes(self._come[start:end])))
            start = end + 1
            end = self._come.find(b"\n", start)
        del self._come[:start]
        if len(self._come) > self.limit:
            raise NotOursError("sent a line of more than %d bytes" % self.limit)
        return messages

    def close(self) -> None:
        """Close it; what was not written is lost."""
        self.sock.close()


def _ended(error: OSError) -> EndedError:
    return EndedError(error.strerror or str(error), by_peer=isinstance(error, (ConnectionResetError, BrokenPipeError)))
