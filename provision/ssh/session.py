"""The way to a node, as Fabric reads it from ``ssh_config``, and what all connections of one command share."""

from __future__ import annotations

import errno
import math
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fabric
import paramiko

from provision.errors import UsageError
from provision.model import Inventory, Node
from provision.ssh.become import Sudo
from provision.ssh.client import Asking, Client
from provision.ssh.login import Again, text_of
from provision.ssh.wire import NodeUnreachable, RemoteError

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

ATTEMPTS = 4  # sshd drops connections at random when many are not logged in yet (MaxStartups 10:30:100)
_WAIT = threading.Event()  # never set: a pause between attempts


class Session:
    """What the connections of one command share: settings, jump hosts, the password and who may ask for it."""

    def __init__(self, inventory: Inventory, prompts: Prompts | None) -> None:
        self.ssh = inventory.ssh
        self.sudo = Sudo(prompts)
        self._asking = Asking(prompts)
        self._jumps: dict[tuple[str, str, int], Any] = {}
        self._lock = threading.Lock()
        try:
            self._config = fabric.Config(lazy=True)  # lazy: no fabric.yaml of the user has a say here
            self._config.load_ssh_config()
        except Exception as error:
            raise UsageError(f"~/.ssh/config cannot be read: {text_of(error)}") from error

    def connect(self, node: Node) -> tuple[paramiko.Transport, bool]:
        """A transport that is logged in, and whether keys alone were enough, on every jump host too."""
        for attempt in range(ATTEMPTS):
            try:
                return self._connect(node)
            except Again as again:  # noqa: PERF203 - a connection costs more than a try
                if attempt == ATTEMPTS - 1:
                    raise NodeUnreachable(node, again.reason, hint=again.hint) from None
                _WAIT.wait(0.3 * 2**attempt)
        raise AssertionError

    def close(self) -> None:
        """Close the connections to jump hosts."""
        for jump in self._jumps.values():
            with suppress(Exception):
                jump.close()

    def _connect(self, node: Node) -> tuple[paramiko.Transport, bool]:
        with self._lock:  # a copy for each connection: Fabric's settings are not made for threads
            connection = self._prepare(
                fabric.Connection(
                    node.address,
                    user=node.user or self.ssh.user,
                    port=node.port or self.ssh.port,
                    config=self._config.clone(),
                    connect_timeout=max(1, math.ceil(self.ssh.timeout)),
                ),
                node,
            )
        try:
            self._open(connection)
        except (RemoteError, Again):
            raise
        except Exception as error:
            raise unreachable(node, error, f"{connection.host} port {connection.port}", self.ssh.timeout) from error
        return connection.transport, _by_key(connection)

    def _prepare(self, connection: Any, node: Node) -> Any:
        """Put our client in place of Fabric's, which adds any host key, and share the jump hosts."""
        connection.client = Client(self.ssh, self._asking, node, connection.ssh_config.get("hostkeyalias"))
        jump = connection.gateway
        if isinstance(jump, fabric.Connection):
            known = self._jumps.setdefault((jump.host, jump.user, jump.port), jump)
            if known is jump:
                self._prepare(jump, Node(f"{node.name}, jump host {jump.host}", jump.host))
            connection.gateway = known
        return connection

    def _open(self, connection: Any) -> None:
        jump = connection.gateway
        if isinstance(jump, fabric.Connection):
            with jump.client.lock:
                self._open(jump)
        connection.open()


def _by_key(connection: Any) -> bool:
    """Whether the node and every jump host before it took a key."""
    while isinstance(connection, fabric.Connection):
        if not connection.client.by_key:
            return False
        connection = connection.gateway
    return True


def unreachable(node: Node, error: Exception, where: str, timeout: float) -> NodeUnreachable:
    """One readable reason for whatever a connection attempt raised."""
    hint = ""
    if isinstance(error, socket.gaierror):
        reason, hint = f"the name of {where} cannot be resolved", "write its IP address into the inventory"
    elif isinstance(error, ConnectionRefusedError):
        reason, hint = f"{where} refuses connections", "is sshd running there, and on this port?"
    elif isinstance(error, TimeoutError) or "protocol banner" in str(error):
        reason, hint = f"no answer from {where} within {timeout:g} s", "is the node up, and is ssh let through?"
    elif isinstance(error, OSError) and error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        reason = f"there is no route to {where}"
    elif isinstance(error, paramiko.ChannelException):
        reason = f"the jump host cannot reach {where}: {error.text}"
    elif isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        reason = f"{where} shares no ssh algorithm with us: {error}"
    elif isinstance(error, EOFError | ConnectionError):
        reason = f"{where} closed the connection"
    else:
        reason = f"{where}: {text_of(error)}"
    return NodeUnreachable(node, reason, hint=hint)
