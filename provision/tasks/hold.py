"""One deploy at a time on a node: a lock that is held by this connection, and goes with it."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, PreflightError
from provision.model import Inventory, Node, Remote
from provision.render import render
from provision.tasks.answers import split

if TYPE_CHECKING:
    from provision.ssh.remote import Connections

BEAT = 2.0  # seconds between two signs of life
_ANSWER = 60.0  # seconds until a node must have said whether it is free; a silent owner is watched for 15


class _Holder(threading.Thread):
    """Runs the script that holds the lock of one node, and keeps what it says."""

    def __init__(self, node: Node, connections: Connections, script: str) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.state = ""
        self.failure: ClusterctlError | None = None
        self.answered = threading.Event()
        self._connections = connections
        self._script = script
        self._let_go = threading.Event()

    def run(self) -> None:
        """Hold until ``let_go``; a failure before the first word is kept."""
        try:
            remote: Remote = self._connections[self.node]
            result = remote.run(self._script, stdin=self._beats(), on_line=self._hear)
            if not self.state:
                self.failure = ClusterctlError(" ".join(result.err.split()) or "cannot be locked")
        except ClusterctlError as error:
            self.failure = error
        finally:
            self.answered.set()

    def let_go(self) -> None:
        """End the script's input, and with it the lock."""
        self._let_go.set()

    def _beats(self) -> Iterator[bytes]:
        while not self._let_go.wait(BEAT):
            yield b"\n"

    def _hear(self, line: str) -> None:
        self.state = line.strip()
        self.answered.set()


@dataclass(frozen=True)
class Lock:
    """The lock that guards a folder on nodes, for one command.

    Attributes:
        path: of the lock.
        releases: the folder of releases that it guards; empty for another one.
        token: tells this command's from every other's.
    """

    path: str
    releases: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of_releases(cls, inventory: Inventory) -> Lock:
        """That of an inventory's releases."""
        releases = f"{inventory.root}/releases"
        return cls(f"{releases}/.lock", releases)

    def guarded(self, script: str) -> str:
        """A script that runs only while the lock is this command's, and is ended with it."""
        return render("release/guard.sh.j2", lock=self.path, id=self.token) + script


@contextmanager
def held(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, lock: Lock, command: str
) -> Iterator[Mapping[str, str]]:
    """Hold a lock on every node while the block runs.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are locked.
        connections: to them.
        lock: the lock.
        command: the name of the command that needs it, for hints.

    Yields:
        By node name, ``""`` for a node of its own, or the name of the node with which it shares the root: what is done
        there is done for it too.

    Raises:
        PreflightError: another command is at work on some node; the message says whose and since when.
        NodesFailedError: a node does not answer.
    """
    who = f"{getpass.getuser()} on {socket.gethostname()}, process {os.getpid()}"
    script = render("release/hold.sh.j2", lock=lock.path, releases=lock.releases, id=lock.token, who=who)
    holders = [_Holder(node, connections, script) for node in nodes]
    try:
        for holder in holders:
            holder.start()
        for holder in holders:
            if not holder.answered.wait(_ANSWER):
                holder.failure = ClusterctlError(f"did not say within {_ANSWER:g} s whether it is free")
        states = {holder.node.name: holder.failure or holder.state for holder in holders}
        split(inventory, nodes, states, command=command)
        _refuse_busy(holders)
        owners = {holder.state.removeprefix("held "): holder.node.name for holder in holders if _holds(holder.state)}
        yield {holder.node.name: _shared(holder.state, owners) for holder in holders}
    finally:
        for holder in holders:
            holder.let_go()
        for holder in holders:
            with suppress(RuntimeError):  # never started
                holder.join(10)


def _holds(state: str) -> bool:
    return state.startswith("held ")


def _shared(state: str, owners: Mapping[str, str]) -> str:
    """The node that holds the lock of a node that shares its root; "" for one that holds its own."""
    if not state.startswith("shared "):
        return ""
    host = state.removeprefix("shared ")
    return owners.get(host, host.split(" ")[0])


def _refuse_busy(holders: Sequence[_Holder]) -> None:
    busy = {}
    for holder in holders:
        if match := re.fullmatch(r"busy (-?[0-9]{1,15}) (.*)", holder.state):
            busy[holder.node.name] = f"another command of {match[2]} {_since(int(match[1]))}"
    if busy:
        raise PreflightError(
            f"{len(busy)} of {len(holders)} nodes are taken by another command; nothing was changed",
            reasons=busy,
            hint="wait until it has ended; a lock whose owner has died is taken over by itself",
        )


def _since(seconds: int) -> str:
    if seconds < 0:  # the clock was set back, or another node's is ahead
        return "is at work here"
    return "has been at work here for " + (f"{seconds} s" if seconds < 120 else f"{seconds // 60} min")
