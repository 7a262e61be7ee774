"""Serves files to other agents on a port of this node, so that copies in the background do not pass rank 0.

It listens at the address by which this node reaches rank 0. The handshake is that of ``protocol.py``; nothing is parsed
before it. Few connections are open at once, and one that does not prove itself has ``DEADLINE`` seconds. When no
connection is possible (a firewall), the other agent copies through rank 0, see ``copies.py``.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, Dict, Optional, Tuple

from . import CopyError
from .copies import Copies
from .protocol import DEADLINE, Host, InvalidMessageError, Stream, UnknownPeerError, read_line

AT_ONCE = 32  # connections; each agent needs one for each node that it copies from
ACCEPT = 0.5  # seconds between checks for the end


class Direct:
    """A listening port that serves the files of ``copies``. ``ranks``: the number of nodes."""

    def __init__(self, copies: Copies, ranks: int) -> None:
        self._copies = copies
        self._ranks = ranks
        self._room = threading.Semaphore(AT_ONCE)
        self._socket: Optional[socket.socket] = None
        self._thread: Optional[threading.Thread] = None
        self._closed = threading.Event()

    def start(self) -> Optional[Tuple[str, int]]:
        """Listen. Returns the address for the other agents; None if that is not possible."""
        try:
            host = self._copies.own_address()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            self._socket.listen(AT_ONCE)
            self._socket.settimeout(ACCEPT)
        except OSError:
            self.close()
            return None
        self._thread = threading.Thread(target=self._accept, name="direct", daemon=True)
        self._thread.start()
        port: int = self._socket.getsockname()[1]
        return host, port

    def close(self) -> None:
        """Stop listening. ``Copies.close`` ends the connections."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * ACCEPT)
        if self._socket is not None:
            self._socket.close()

    def _accept(self) -> None:
        assert self._socket is not None
        while not self._closed.is_set():
            try:
                sock, _ = self._socket.accept()
            except OSError:  # none came, or there are no descriptors
                continue
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="direct copy", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            # The receiving side sees that its connection closes, and copies through rank 0.
            with contextlib.suppress(CopyError, OSError, InvalidMessageError, UnknownPeerError):
                self._copies.serve_files(self._greet(sock))
        finally:
            sock.close()
            self._room.release()

    def _greet(self, sock: socket.socket) -> Stream:
        """The handshake, as rank 0's (``hub.py``).

        Raises:
            CopyError, OSError, InvalidMessageError, UnknownPeerError: it is not an agent of this run.
        """
        until = time.monotonic() + DEADLINE
        host = Host(self._copies.token)
        while host.session is None:
            sock.settimeout(max(0.01, until - time.monotonic()))
            sock.sendall(host.take(read_line(sock)))
            if time.monotonic() > until:
                raise InvalidMessageError("did not identify itself in time")
        stream = Stream(sock, host.session, lambda: time.monotonic() < until)
        hello: Dict[str, Any] = stream.receive() or {}
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 <= rank < self._ranks or hello.get("run") != self._copies.run:
            raise InvalidMessageError("did not identify its agent")
        stream.send({"welcome": True})
        stream.alive = lambda: not self._closed.is_set()
        return stream
