"""Opens ssh connections, directly, by the routes in ``ssh_config`` or through the inventory's jump hosts.

Holds the state that the connections of one command share.
"""

from __future__ import annotations

import errno
import math
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import fabric
import paramiko

from provision.errors import Reason, UsageError
from provision.model import Inventory, Node
from provision.render import quote
from provision.ssh.client import Client, Questions, Retry, hang_up, text_of
from provision.ssh.jumps import JumpHostFailed, JumpHosts, JumpRetry, NotReached
from provision.ssh.proxy import Proxy, ProxyFailedError
from provision.ssh.wire import HostKeyChanged, HostKeyUnknown, NodeUnreachable, RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from provision.ssh.prompts import Prompts

ATTEMPTS = 4  # sshd drops connections at random while many are not logged in (MaxStartups 10:30:100)
_MATCHES = frozenset({"all", "canonical", "final", "host", "originalhost", "user", "localuser", "exec"})
_STILL = 5.0  # seconds during which a failed jump host is not tried again for another node
_WAIT = threading.Event()  # never set: a pause between attempts


class _Connection(fabric.Connection):  # type: ignore[misc]
    """Fixes Fabric's connection, whose instances may then share one ``Config``.

    Fabric's reads ``ProxyJump none`` as a name, takes several jump hosts backwards, and adds each host's key files to
    the settings. A copy of the settings for each connection costs more CPU time than its handshake.
    """

    label = ""  # the inventory's name of it

    def resolve_connect_kwargs(self, _given: object) -> dict[str, list[str]]:
        """The key files of ssh_config."""
        return {"key_filename": list(self.ssh_config.get("identityfile", ()))}

    def get_gateway(self) -> Any:
        """The last jump host, the proxy command, or None."""
        hops = self.ssh_config.get("proxyjump", "").split(",")
        if hops == [""]:
            return super().get_gateway()
        gateway = None
        for hop in hops if hops[0].lower() != "none" else ():
            if self.derive_shorthand(hop)["host"] == self.host:
                return None
            gateway = _Connection(hop.strip(), config=self.config, **({"gateway": gateway} if gateway else {}))
        return gateway

    def open_gateway(self) -> Any:
        """A channel through the jump host, whose connection is open. Fabric's has no timeout."""
        channel = self.gateway.transport.open_channel
        try:
            return channel("direct-tcpip", (self.host, int(self.port)), ("", 0), timeout=self.connect_timeout)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise _NoChannelError from error


class _NoChannelError(Exception):
    """A jump host opened no channel to the node; the cause says why."""


class Login(NamedTuple):
    """A connection that is logged in."""

    transport: paramiko.Transport
    by_key: bool  # keys alone were enough, also on every jump host
    jump: Node | None  # the jump host of the inventory that leads to it


class Session:
    """State that the connections of one command share: settings, jump hosts, and the ssh password.

    ``warn`` receives a sentence for each jump host that is replaced by another one, in any thread.
    """

    def __init__(
        self, inventory: Inventory, prompts: Prompts | None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.ssh = inventory.ssh
        self._jump_hosts = JumpHosts(inventory, warn)
        self._questions = Questions(prompts)
        self._jumps: dict[tuple[str, str, int], Any] = {}
        self._failed: dict[int, tuple[float, RemoteError]] = {}  # jump hosts: when, and why
        self._lock = threading.Lock()
        try:
            read = fabric.Config(lazy=True)  # lazy: ignores the user's fabric.yaml
            read.load_ssh_config()
            _drop_unknown(read.base_ssh_config)
            # Given as an object: the copies that Fabric makes for jump hosts do not read the files again.
            self._config = fabric.Config(lazy=True, ssh_config=read.base_ssh_config)
        except Exception as error:
            raise UsageError(f"~/.ssh/config cannot be read: {text_of(error)}") from error

    def connect(self, node: Node) -> Login:
        """Connect to a node and log in.

        Raises:
            NodeUnreachable: it cannot be reached by any way.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self._connect(node)
            except Retry as retry:  # noqa: PERF203 - a connection costs more than a try
                if attempt == ATTEMPTS - 1:
                    raise NodeUnreachable(node, retry.reason, hint=retry.hint) from None
                _WAIT.wait(0.3 * 2**attempt)
        raise AssertionError

    def close(self) -> None:
        """Close the connections to jump hosts."""
        for jump in self._jumps.values():
            if jump.transport:
                hang_up(jump.transport)

    def _connect(self, node: Node) -> Login:
        """Connect through a jump host of the inventory, or by ssh_config's way."""
        if not self._jump_hosts.lead_to(node):
            return self._log_in(node, None)
        return self._jump_hosts.log_in(node, partial(self._log_in, node))

    def _log_in(self, node: Node, jump: Node | None) -> Login:
        try:
            with self._lock:  # Fabric's settings are not thread-safe while a connection is made
                way = {"gateway": self._made(jump)} if jump else {}
                connection = self._prepare(self._made(node, **way), node)
        except Exception as error:  # an invalid port, canonical names without domains, a loop of jump hosts
            why = f"~/.ssh/config cannot be used for {node.address}: {_cause(error)}"
            raise NodeUnreachable(node, why, hint=f"ssh -G {quote(node.address)}") from error
        self.open_connection(connection, node)
        return Login(connection.transport, _by_key(connection), jump)

    def _made(self, node: Node, **way: _Connection) -> _Connection:
        connection = _Connection(
            node.address,
            user=node.user or self.ssh.user,
            port=node.port or self.ssh.port,
            config=self._config,
            connect_timeout=max(1, math.ceil(self.ssh.timeout)),
            **way,
        )
        connection.label = node.name
        return connection

    def _prepare(self, connection: Any, node: Node) -> Any:
        """Replace Fabric's client, which accepts any host key, and share the jump hosts."""
        connection.client = Client(self.ssh, self._questions, node, connection.ssh_config.get("hostkeyalias"))
        jump = connection.gateway
        if isinstance(jump, str):
            connection.open_gateway = partial(Proxy, jump)
        if isinstance(jump, _Connection):
            jump.label = jump.label or jump.host
            known = self._jumps.setdefault((jump.host, jump.user, jump.port), jump)
            if known is jump:
                self._prepare(jump, Node(f"{node.name}, jump host {jump.label}", jump.host))
            connection.gateway = known
        return connection

    def open_connection(self, connection: Any, node: Node) -> None:
        """Connect to a node, after its jump hosts.

        Raises:
            NodeUnreachable: the connection failed; if a jump host is the cause, the reason starts with its name.
            JumpHostFailed, NotReached: the same, at or behind the last jump host.
            Retry: the attempt is worth repeating.
        """
        jump = connection.gateway
        if isinstance(jump, _Connection):
            with jump.client.lock:
                self._open_jump(jump, node)
        try:
            connection.open()
        except (RemoteError, Retry):
            raise
        except _NoChannelError as error:
            raise self._no_channel(connection, node, error.__cause__) from error
        except Exception as error:
            raise unreachable(
                node, error, f"{connection.host} port {connection.port}", self.ssh.timeout, host=connection.host
            ) from error

    def _open_jump(self, jump: Any, node: Node) -> None:
        """Connect to a jump host. A failure a moment ago for another node counts for this one too."""
        when, failure = self._failed.get(id(jump), (-math.inf, None))
        if failure and time.monotonic() - when < _STILL:
            raise type(failure)(node, failure.reason, hint=failure.hint)
        try:
            self.open_connection(jump, node)
        except RemoteError as error:
            reason = error.reason if isinstance(error, JumpHostFailed) else f"jump host {jump.label}: {error.reason}"
            kind = type(error) if isinstance(error, HostKeyUnknown | HostKeyChanged) else JumpHostFailed
            named = kind(node, Reason(reason), hint=error.hint)
            self._failed[id(jump)] = time.monotonic(), named
            raise named from error
        except Retry as retry:
            why = retry.reason if isinstance(retry, JumpRetry) else f"jump host {jump.label}: {retry.reason}"
            raise JumpRetry(why, retry.hint) from retry
        self._failed.pop(id(jump), None)

    def _no_channel(self, connection: _Connection, node: Node, error: BaseException | None) -> NodeUnreachable:
        jump, where = connection.gateway, f"{connection.host} port {connection.port}"
        if not jump.transport.is_active():
            return JumpHostFailed(node, Reason(f"jump host {jump.label} closed the connection"))
        if "Timeout" in str(error):
            if not _answers(jump.transport, self.ssh.timeout):
                return JumpHostFailed(node, Reason(f"jump host {jump.label} no longer answers"))
            why = f"no answer from {where} through the jump host within {self.ssh.timeout:g} s"
        else:  # paramiko loses the jump host's text if several channels are refused at once
            text = f": {error.text}" if isinstance(error, paramiko.ChannelException) else ""
            why = f"the jump host cannot reach {where}{text}"
        return NotReached(node, Reason.about(why, node.name, connection.host, node.port))


def _answers(jump: paramiko.Transport, seconds: float) -> bool:
    """Whether a jump host whose connection is open still answers: also to a session that it does not allow."""
    try:
        jump.open_session(timeout=seconds).close()
    except paramiko.ChannelException:
        return True
    except (paramiko.SSHException, EOFError, OSError):
        return False
    return True


def _drop_unknown(config: Any) -> None:
    """Drop Match blocks with keywords unknown to paramiko, which would apply them to every host and run commands."""
    blocks = config._config  # noqa: SLF001 - there is no public interface
    for block in blocks:
        for match in block.get("matches", ()):
            match["type"] = match["type"].lower()
    known = [block for block in blocks if all(match["type"] in _MATCHES for match in block.get("matches", ()))]
    config._config = known  # noqa: SLF001


def _by_key(connection: Any) -> bool:
    """Whether keys alone logged in to the node and to every jump host before it."""
    while isinstance(connection, _Connection):
        if not connection.client.by_key:
            return False
        connection = connection.gateway
    return True


def _cause(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing or unknown"
    return "its jump hosts form a loop" if isinstance(error, RecursionError) else text_of(error)


def unreachable(node: Node, error: Exception, where: str, timeout: float, *, host: str = "") -> NodeUnreachable:
    """A readable reason for the exception of a connection attempt; ``host``: the address in ssh_config."""
    hint = ""
    if isinstance(error, socket.gaierror):
        reason, hint = f"the name of {where} cannot be resolved", "write its IP address into the inventory"
    elif isinstance(error, ConnectionRefusedError):
        reason, hint = f"{where} refuses connections", "is sshd running there, and on this port?"
    elif isinstance(error, TimeoutError) or "protocol banner" in str(error):
        reason, hint = (
            f"no answer from {where} within {timeout:g} s",
            "is the node up, and does the firewall allow ssh?",
        )
    elif isinstance(error, OSError) and error.errno in {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        reason = f"there is no route to {where}"
    elif isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        reason = f"{where} and this machine have no ssh algorithm in common: {error}"
    elif isinstance(error, ProxyFailedError):
        reason, hint = f"{where}: {error}", f"try it by hand: ssh -v {quote(node.address)}"
    elif isinstance(error, EOFError | ConnectionError):
        reason = f"{where} closed the connection"
    else:
        reason = f"{where}: {text_of(error)}"
    return NodeUnreachable(node, Reason.about(reason, node.name, host or node.address, node.port), hint=hint)
