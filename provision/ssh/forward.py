"""Forwards a port of this machine's 127.0.0.1 to a port of a node, through the existing ssh connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from provision.errors import ClusterctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

HOST = "127.0.0.1"  # never another address: every machine of the network could use the tunnel
CONNECTIONS = 64  # at once; more wait in the listener's queue
_PIECE = 1 << 15  # bytes; with the window of a channel, all that a connection keeps in memory


class Pipe(Protocol):
    """A connection to a node's port. Every method may be called from any thread."""

    def read_out(self) -> bytes:
        """Some bytes; empty at the end."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of ``data``; waits while the other end does not read. Raises OSError at its end."""
        ...

    def finish(self) -> None:
        """End the input; the other direction stays open."""
        ...

    def close(self) -> None:
        """Close the connection, and wake the threads that read or write."""
        ...


def listen(port: int) -> socket.socket:
    """A listener on a port of 127.0.0.1; 0 is a free one.

    Raises:
        UsageError: the port is taken, or needs root; the hint names a free one.
    """
    try:
        return socket.create_server((HOST, port), backlog=128)
    except OSError as error:
        with socket.create_server((HOST, 0)) as free:
            other = free.getsockname()[1]
        why = error.strerror or error
        raise UsageError(
            f"port {port} of this machine cannot be used: {why}", hint=f"another one: --port {other}"
        ) from None


class Forward:
    """Accepts connections until the end of the ``with`` block, and carries each to the node.

    Args:
        listener: from ``listen``; it is closed at the end.
        dial: connects to the node's port; an error closes the one connection.
        failed: receives that error.
    """

    def __init__(
        self, listener: socket.socket, dial: Callable[[], Pipe], failed: Callable[[ClusterctlError], None]
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._dial, self._failed = listener, dial, failed
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._open: set[_Connection] = set()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="forward", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            connections = tuple(self._open)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                sock, _ = self._listener.accept()
            except ConnectionAbortedError:  # the client has gone again
                self._slots.release()
                continue
            except OSError:  # closed
                return
            threading.Thread(target=self._carry, args=(sock,), daemon=True).start()

    def _carry(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(sock, self._dial())
            with self._lock:
                self._open.add(connection)
                closed = self._closed
            try:
                if not closed:
                    connection.carry()
            finally:
                connection.close()
                with self._lock:
                    self._open.discard(connection)
        except ClusterctlError as error:
            self._failed(error)
        finally:
            sock.close()
            self._slots.release()


class _Connection:
    """One connection: two directions, each of which may end before the other."""

    def __init__(self, near: socket.socket, far: Pipe) -> None:
        self._near, self._far = near, far

    def carry(self) -> None:
        """Copy in both directions until both have ended."""
        out = threading.Thread(target=self._guarded, args=(self._outwards,), daemon=True)
        out.start()
        self._guarded(self._inwards)
        out.join()

    def close(self) -> None:
        """Close both ends, and wake the threads that read or write."""
        with suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)
        self._far.close()

    def _guarded(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except OSError:  # one end was reset: the other direction cannot be of use
            self.close()

    def _outwards(self) -> None:
        while data := self._near.recv(_PIECE):
            self._far.write(data)
        self._far.finish()

    def _inwards(self) -> None:
        while data := self._far.read_out():
            self._near.sendall(data)
        self._near.shutdown(socket.SHUT_WR)
