"""This machine as a ``Remote``: runs the same scripts, without ssh."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.ssh.become import Sudo, SudoEscalation
from provision.ssh.openssh import ProcessStream
from provision.ssh.wire import (
    BOOTSTRAP,
    STOP,
    Broken,
    DeadlineExceeded,
    Expired,
    NodeUnreachable,
    OutputTooLong,
    PortRefused,
    converse,
    too_long,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from provision.model import Node, Result

_PATIENCE = 2.0  # seconds for a script to clean up after SIGTERM
_LOOK = 0.02  # seconds between checks


class LocalRemote:
    """A node that is this machine; see ``model.Remote``. Each script has its own process group."""

    by_key = False  # the system's ssh does not reach it

    def __init__(self, node: Node, *, sudo: Sudo | None = None) -> None:
        self.node = node
        self._sudo = sudo or Sudo(None)
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether it still accepts scripts."""
        return not self._closed

    @property
    def host_key(self) -> tuple[str, bytes]:
        """Not available: there is no ssh connection to this machine.

        Raises:
            NodeUnreachable: always.
        """
        raise NodeUnreachable(self.node, "it is this machine, and other nodes cannot reach it at its address `local`")

    def run(
        self,
        script: str,
        *,
        stdin: Iterable[bytes] | None = None,
        on_line: Callable[[str], None] | None = None,
        deadline: float | None = None,
        root: bool = False,
    ) -> Result:
        """See ``model.Remote.run``. The script starts in the home folder, as after a login."""
        escalation = SudoEscalation(self.node, getpass.getuser(), self._sudo) if root and os.geteuid() != 0 else None
        with self._lock:
            if self._closed:
                raise NodeUnreachable(self.node, "the program is ending")
            stream = _Stream(self._stop_as_root if escalation else _stop)
            self._streams.add(stream)
        try:
            return converse(stream, script, stdin=stdin, on_line=on_line, deadline=deadline, escalation=escalation)
        except Expired:
            raise DeadlineExceeded(self.node, f"not finished within {deadline:g} s") from None
        except OutputTooLong as error:
            raise too_long(self.node, error) from None
        except Broken as broken:
            refused = escalation.why_ended() if escalation and not broken.begun else None
            raise refused or NodeUnreachable(self.node, "the script was killed") from None
        finally:
            with self._lock:
                self._streams.discard(stream)

    def dial(self, port: int) -> SocketStream:
        """A connection to a port of 127.0.0.1.

        Raises:
            PortRefused: no process listens on it.
        """
        try:
            return SocketStream(socket.create_connection(("127.0.0.1", port)))
        except OSError as error:
            raise PortRefused(self.node, f"no process listens on 127.0.0.1:{port}: {error.strerror}") from error

    def close(self) -> None:
        """Stop the scripts that are still running."""
        with self._lock:
            self._closed = True
            streams = tuple(self._streams)
        for stream in streams:
            stream.abort()

    def _stop_as_root(self, group: int) -> None:
        """End a process group that belongs to root."""
        beside = _Stream(_stop)
        with suppress(ClusterctlError, Broken, Expired, OutputTooLong):
            escalation = SudoEscalation(self.node, getpass.getuser(), self._sudo)
            converse(beside, STOP.format(group=group), deadline=_PATIENCE, escalation=escalation)


class SocketStream:
    """A connection to a port of this machine as a ``forward.Pipe``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read_out(self) -> bytes:
        """Some bytes; empty at the end."""
        with suppress(OSError):
            return self._connection.recv(1 << 16)
        return b""

    def write(self, data: bytes) -> None:
        """Send all of ``data``; OSError if the other end no longer reads."""
        self._connection.sendall(data)

    def finish(self) -> None:
        """End the input."""
        self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, and wake the thread that reads."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class _Stream(ProcessStream):
    """A bootstrap on this machine. ``stop`` ends the script's process group."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        home = Path.home()
        super().__init__(["/bin/sh", "-c", BOOTSTRAP], None, folder=home if home.is_dir() else Path("/"))
        self._stop = stop

    def abort(self) -> None:
        """Send SIGTERM to the script's process group, and later SIGKILL."""
        group = self._process.pid  # it leads its own session; not reaped yet, so the number is not reused
        if self._process.returncode is not None:
            return
        if self.group:
            self._stop(self.group)
            until = time.monotonic() + _PATIENCE
            while _members(group) and time.monotonic() < until:
                time.sleep(_LOOK)  # no system call waits for the end of a process group
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _stop(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)


def _members(group: int) -> bool:
    """Whether a process group has a living process: the fifth field of /proc/PID/stat (proc(5))."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found, *_ = path.read_bytes().rpartition(b")")[2].split()
            if int(found) == group and state not in b"ZX":
                return True
    return False
