"""Connections to nodes: Fabric finds the route (``ssh_config``, jump hosts), paramiko implements the protocol.

Only this folder imports them. The user is asked only if ``Prompts`` are given. Errors of paramiko become
``RemoteError`` with a readable reason.
"""

from __future__ import annotations

import resource
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.ssh.become import Sudo
from provision.ssh.fanout import fan_out
from provision.ssh.local import LocalRemote
from provision.ssh.prompts import Prompts
from provision.ssh.wire import (
    BOOTSTRAP,
    AnswerUnreadable,
    DeadlineExceeded,
    HostKeyChanged,
    HostKeyUnknown,
    NodeUnreachable,
    PortRefused,
    RemoteError,
    RootRefused,
    reading,
    sent_length,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from provision.model import Inventory, Node
    from provision.ssh.session import Session
    from provision.ssh.ssh_remote import SshRemote

__all__ = [
    "BOOTSTRAP",
    "AnswerUnreadable",
    "Connections",
    "DeadlineExceeded",
    "HostKeyChanged",
    "HostKeyUnknown",
    "NodeUnreachable",
    "PortRefused",
    "Prompts",
    "RemoteError",
    "RootRefused",
    "connect",
    "fan_out",
    "reading",
    "sent_length",
]


_FILES = 512  # of the program itself
_EACH = 2  # for a node: its connection, and a second one for a transfer


def connect(inventory: Inventory, node: Node, *, prompts: Prompts | None = None) -> SshRemote | LocalRemote:
    """Connect to one node. For several nodes use ``Connections``, which share jump hosts and the password.

    Raises:
        HostKeyUnknown: the host key is not pinned, and was not confirmed.
        HostKeyChanged: the host key is not the pinned one.
        NodeUnreachable: the login failed for another reason.
    """
    return _connect(_session((node,), inventory, prompts), Sudo(prompts), node)


def _session(
    nodes: Sequence[Node], inventory: Inventory, prompts: Prompts | None, warn: Callable[[str], None] | None = None
) -> Session | None:
    """State that ssh connections share; None if all nodes are this machine, which needs neither Fabric nor paramiko."""
    if nodes and all(node.is_local for node in nodes):
        return None
    from provision.ssh.session import Session  # noqa: PLC0415 - a third of a start; --help needs none of it

    return Session(inventory, prompts, warn)


def _connect(session: Session | None, sudo: Sudo, node: Node) -> SshRemote | LocalRemote:
    if node.is_local:
        return LocalRemote(node, sudo=sudo)
    from provision.ssh.ssh_remote import SshRemote  # noqa: PLC0415 - see _session

    assert session is not None
    login = session.connect(node)
    return SshRemote(node, login.transport, by_key=login.by_key, sudo=sudo, jump=login.jump)


def _allow_files(connections: int) -> None:
    """Raise the soft limit of open files, if the hard one allows it: many systems start programs with 1,024."""
    wanted = _FILES + _EACH * connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class Connections:
    """One connection per node, opened on first use and closed at the end of the ``with`` block.

    Any thread may use any node: ``pool[node].run(…)``. A broken connection is opened again on the next use. ``warn``
    receives a sentence for each jump host that is replaced by another one, in any thread.
    """

    def __init__(
        self, inventory: Inventory, prompts: Prompts | None = None, warn: Callable[[str], None] | None = None
    ) -> None:
        self.inventory = inventory
        _allow_files(len(inventory.nodes))
        self._session = _session(inventory.nodes, inventory, prompts, warn)
        self._sudo = Sudo(prompts)
        self._lock = threading.Lock()
        self._slots: dict[str, _Slot] = {}
        self._separate: list[SshRemote | LocalRemote] = []
        self._closed = False

    def __getitem__(self, node: Node) -> SshRemote | LocalRemote:
        with self._lock:
            slot = self._slots.setdefault(node.name, _Slot())
        with slot.lock:
            if slot.remote is None or not slot.remote.alive:
                remote = _connect(self._session, self._sudo, node)
                if slot.remote:
                    slot.remote.close()
                slot.remote = remote
            if self._closed:
                slot.remote.close()
                raise NodeUnreachable(node, "the program is ending")
            return slot.remote

    def open_separate(self, node: Node) -> SshRemote | LocalRemote:
        """Another connection to a node, for the caller alone; closing it stops no other script there."""
        remote = _connect(self._session, self._sudo, node)
        with self._lock:
            self._separate.append(remote)
        if self._closed:
            remote.close()
        return remote

    def close(self) -> None:
        """Close every connection and stop the scripts that are still running."""
        self._closed = True
        with self._lock:
            remotes = [*(slot.remote for slot in self._slots.values() if slot.remote), *self._separate]
        closers = [threading.Thread(target=remote.close, daemon=True) for remote in remotes]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(5)
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    remote: SshRemote | LocalRemote | None = None
