"""A node behind a paramiko connection."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import paramiko

from provision.errors import ClusterctlError
from provision.ssh.become import SudoEscalation
from provision.ssh.channel import ChannelStream
from provision.ssh.client import DEAD_AFTER
from provision.ssh.framing import BOOTSTRAP, OutputTooLong
from provision.ssh.login import hang_up, text_of
from provision.ssh.wire import STOP, Broken, DeadlineExceeded, Expired, NodeUnreachable, converse, too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from provision.model import Node, Result
    from provision.ssh.become import Sudo

# Errors are raised; paramiko also logs them, to stderr if logging is not configured.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshRemote:
    """A node behind a paramiko connection; see ``model.Remote``. Several scripts may run on it at once."""

    def __init__(self, node: Node, transport: paramiko.Transport, *, by_key: bool, sudo: Sudo) -> None:
        self.node = node
        self.by_key = by_key  # logged in without a password, so the system's ssh can too
        self._sudo = sudo
        self._transport = transport
        self._user = transport.get_username() or ""
        self._streams: set[ChannelStream] = set()
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the connection is open, as far as is known."""
        return self._transport.is_active()

    @property
    def host_key(self) -> tuple[str, bytes]:
        """Type and wire form of the key that the node has shown and that was believed."""
        key = self._transport.get_remote_server_key()
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

    def close(self) -> None:
        """Close the connection and stop the scripts that are still running on it."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.abort()
        hang_up(self._transport)

    def _start(self, timeout: float) -> ChannelStream:
        try:
            channel = self._transport.open_session(timeout=timeout)
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
            return NodeUnreachable(self.node, f"the connection was lost: {text_of(self._transport.get_exception())}")
        if broken.begun:
            return NodeUnreachable(self.node, "the script was killed on the node, or its connection was closed")
        said = " ".join((broken.out + " " + broken.err).split())
        return NodeUnreachable(
            self.node,
            "the login shell did not start sh" + (f": {said[:200]}" if said else ""),
            hint="the user needs a login shell that runs commands, and sh and dd on its PATH",
        )
