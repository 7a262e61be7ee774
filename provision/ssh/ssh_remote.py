"""A node behind a paramiko connection."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import paramiko

from provision.errors import ClusterctlError
from provision.ssh.become import SudoEscalation
from provision.ssh.client import DEAD_AFTER, hang_up, text_of
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
    drain,
    frame,
    too_long,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from provision.model import Node, Result
    from provision.ssh.become import Sudo

_PROHIBITED = 1  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED of RFC 4254, 5.1
_WINDOW = 1 << 20  # bytes that a forwarded connection keeps in memory while its reader is slow

# Errors are raised; paramiko also logs them, to stderr if logging is not configured.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshRemote:
    """A node behind a paramiko connection; see ``model.Remote``. Several scripts may run on it at once."""

    def __init__(
        self, node: Node, transport: paramiko.Transport, *, by_key: bool, sudo: Sudo, jump: Node | None = None
    ) -> None:
        self.node = node
        self.by_key = by_key  # logged in without a password, so the system's ssh can too
        self.jump = jump  # the jump host of the inventory that leads to the node
        self._sudo = sudo
        self.transport = transport
        self._user = transport.get_username() or ""
        self._streams: set[ChannelStream] = set()
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self.transport.is_active()

    @property
    def host_key(self) -> tuple[str, bytes]:
        """Type and wire form of the key that the node has shown and that was believed."""
        key = self.transport.get_remote_server_key()
        return key.get_name(), key.asbytes()

    def run(
        self,
        script: str,
        *,
        stdin: Iterable[bytes] | None = None,
        on_line: Callable[[str], None] | None = None,
        deadline: float | None = None,
        root: bool = False,
    ) -> Result:
        """See ``model.Remote.run``. Bytes that are not UTF-8 become surrogates."""
        stream = self._start(min(DEAD_AFTER, deadline or DEAD_AFTER))
        escalation = None
        if root and self._user != "root":
            escalation = SudoEscalation(self.node, self._user, self._sudo)
            stream.stop = self._stop_as_root
        try:
            return converse(stream, script, stdin=stdin, on_line=on_line, deadline=deadline, escalation=escalation)
        except Expired:
            raise DeadlineExceeded(self.node, f"not finished within {deadline:g} s") from None
        except OutputTooLong as error:
            raise too_long(self.node, error) from None
        except Broken as broken:
            refused = escalation.why_ended() if escalation and self.alive and not broken.begun else None
            raise refused or self._broken(broken) from None
        finally:
            with self._lock:
                self._streams.discard(stream)

    def dial(self, port: int) -> ChannelStream:
        """A connection to a port of the node's 127.0.0.1, through the ssh connection (RFC 4254, 7.2).

        Raises:
            NodeUnreachable: the connection to the node was lost.
            PortRefused: no process listens on the port, or sshd forwards no ports.
        """
        try:
            channel = self.transport.open_channel(
                "direct-tcpip", ("127.0.0.1", port), ("127.0.0.1", 0), window_size=_WINDOW, timeout=DEAD_AFTER
            )
        except paramiko.ChannelException as error:
            if error.code == _PROHIBITED:
                fix = "allow it in the node's sshd_config: AllowTcpForwarding local"
                raise PortRefused(self.node, f"its sshd forwards no ports: {error.text}", hint=fix) from error
            raise PortRefused(self.node, f"no process listens on 127.0.0.1:{port}: {error.text}") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise NodeUnreachable(self.node, f"the connection was lost: {text_of(error)}") from error
        return ChannelStream(channel)

    def close(self) -> None:
        """Close the connection and stop the scripts that are still running on it."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.abort()
        hang_up(self.transport)

    def _start(self, timeout: float) -> ChannelStream:
        try:
            channel = self.transport.open_session(timeout=timeout)
            channel.exec_command(BOOTSTRAP)
        except paramiko.ChannelException as error:
            raise NodeUnreachable(
                self.node,
                f"the node refuses more sessions: {error.text}",
                hint="raise MaxSessions in the node's sshd_config",
            ) from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise NodeUnreachable(self.node, f"the connection was lost: {text_of(error)}") from error
        stream = ChannelStream(channel)
        with self._lock:
            self._streams.add(stream)
        return stream

    def _stop_as_root(self, group: int) -> None:
        """End a process group that belongs to root."""
        beside = self._start(2)
        with suppress(ClusterctlError, Broken, Expired, OutputTooLong):
            escalation = SudoEscalation(self.node, self._user, self._sudo)
            converse(beside, STOP.format(group=group), deadline=2, escalation=escalation)

    def _broken(self, broken: Broken) -> NodeUnreachable:
        if not self.alive:
            return NodeUnreachable(self.node, f"the connection was lost: {text_of(self.transport.get_exception())}")
        if broken.begun:
            return NodeUnreachable(self.node, "the script was killed on the node, or its connection was closed")
        printed = " ".join((broken.out + " " + broken.err).split())
        return NodeUnreachable(
            self.node,
            "the login shell did not start sh" + (f": {printed[:200]}" if printed else ""),
            hint="the user needs a login shell that runs commands, and sh and dd on its PATH",
        )


class ChannelStream:
    """paramiko's channel as a ``wire.Stream``."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.group: int | None = None
        self.stop: Callable[[int], None] | None = None  # ends a process group that belongs to root
        self._channel = channel

    def read_out(self) -> bytes:
        """Some bytes of stdout; empty at its end."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            return self._channel.recv(1 << 17)
        return b""

    def read_err(self) -> bytes:
        """Some bytes of stderr; empty at its end."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            return self._channel.recv_stderr(1 << 17)
        return b""

    def write(self, data: bytes) -> None:
        """Send all of ``data``; OSError if the command no longer reads."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), 1 << 15):  # sendall copies the rest after every packet
                self._channel.sendall(view[start : start + (1 << 15)].tobytes())
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """End the input."""
        try:
            self._channel.shutdown_write()
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def abort(self) -> None:
        """Stop the script before closing the channel, which would look to it like the end of its input."""
        stopper = threading.Thread(target=self._end, daemon=True)
        stopper.start()
        stopper.join(6)
        if stopper.is_alive():  # the connection takes no more bytes
            hang_up(self._channel.get_transport())

    def close(self) -> None:
        """Close the channel."""
        threading.Thread(target=self._hang_up, daemon=True).start()  # a dead connection would block it

    def _end(self) -> None:
        channel = self._channel
        with suppress(paramiko.SSHException, EOFError, OSError):
            if self.group and not channel.closed and self.stop:
                self.stop(self.group)
            elif self.group and not channel.closed:
                beside = channel.get_transport().open_session(timeout=2)
                beside.settimeout(2)
                beside.exec_command(BOOTSTRAP)
                script = STOP.format(group=self.group)
                beside.sendall(frame(script, "stop"))
                while beside.recv(1 << 10):
                    pass
                beside.close()
            if self.group and not channel.closed:
                drain(self)
        self._hang_up()

    def _hang_up(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()
