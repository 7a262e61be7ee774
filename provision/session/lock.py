"""The lock that allows one command at a time on a node. It is released when its connection closes."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, PreflightError
from provision.render import render
from provision.session.conversation import Conversation, run_conversations
from provision.session.outcome import Failure, Outcome

if TYPE_CHECKING:
    from provision.model import Inventory, Node
    from provision.session.session import Session

BEAT = 2.0  # seconds between heartbeats
SILENT = 15  # seconds without a heartbeat after which an owner counts as dead
_ANSWER = 60.0  # seconds for a node to answer, which may watch a silent owner first


@dataclass(frozen=True)
class Lock:
    """The lock on a folder of the nodes, for one command.

    Attributes:
        path: the lock's path.
        releases: the folder of releases that it protects; empty for another folder.
        token: identifies this command.
    """

    path: str
    releases: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of_releases(cls, inventory: Inventory) -> Lock:
        """The lock on an inventory's releases."""
        releases = f"{inventory.root}/releases"
        return cls(f"{releases}/.lock", releases)

    def guarded(self, script: str) -> str:
        """A script that runs only while this command holds the lock, and is killed when the lock is lost."""
        return render("release/guard.sh.j2", lock=self.path, id=self.token) + script


@dataclass(frozen=True)
class Sharing:
    """Which locked nodes share a folder, so that a change on one of them changes the others.

    ``owners`` maps a node to the node that holds its folder's lock, or to ``""`` if it holds the lock itself.
    """

    owners: Mapping[str, str]

    def owner(self, node: Node) -> str:
        """The node that holds this node's lock; empty if the node holds it itself."""
        return self.owners.get(node.name, "")

    def own(self, nodes: Iterable[Node]) -> tuple[Node, ...]:
        """The nodes that hold their own lock."""
        return tuple(node for node in nodes if not self.owner(node))


@contextmanager
def hold(session: Session, nodes: Iterable[Node], lock: Lock) -> Iterator[Sharing]:
    """Hold a lock on every node while the block runs.

    Raises:
        PreflightError: another command is running on a node; the message names its user and its age.
        NodesFailedError: a node does not answer.
    """
    who = f"{getpass.getuser()} on {socket.gethostname()}, process {os.getpid()}"
    fields = {"lock": lock.path, "releases": lock.releases, "id": lock.token, "who": who}
    script = render("release/hold.sh.j2", **fields, silent=SILENT)
    holders = [Conversation(node, session.connections.__getitem__, script, beat=BEAT) for node in nodes]
    with run_conversations(holders):
        limit = time.monotonic() + _ANSWER
        answers = {holder.node: _answer(holder, max(0.0, limit - time.monotonic())) for holder in holders}
        failed = {
            node.name: Failure.of(answer, session.inventory, node)
            for node, answer in answers.items()
            if isinstance(answer, ClusterctlError)
        }
        states = {node.name: answer.strip() for node, answer in answers.items() if isinstance(answer, str)}
        Outcome(session, states, failed).required()
        refuse_busy(states)
        yield sharing(states)


def refuse_busy(states: Mapping[str, str]) -> None:
    """Refuse nodes on which another command is running.

    Raises:
        PreflightError: there are some.
    """
    busy = {}
    for name, state in states.items():
        if match := re.fullmatch(r"busy (-?[0-9]{1,15}) (.*)", state):
            busy[name] = f"another command of {match[2]} {_since(int(match[1]))}"
    if busy:
        raise PreflightError(
            f"{len(busy)} of {len(states)} nodes are locked by another command; nothing was changed",
            reasons=busy,
            hint="wait until it finishes; the lock of a command that died is taken over automatically",
        )


def sharing(states: Mapping[str, str]) -> Sharing:
    """Which nodes share a folder, from their answers about the lock: ``held HOST`` or ``shared HOST``."""
    hosts = {state.removeprefix("held "): name for name, state in states.items() if state.startswith("held ")}
    owners = {}
    for name, state in states.items():
        host = state.removeprefix("shared ")
        owners[name] = hosts.get(host, host.split(" ")[0]) if state.startswith("shared ") else ""
    return Sharing(owners)


def _answer(holder: Conversation, seconds: float) -> str | ClusterctlError:
    """The first line of the lock's script, or why there is none."""
    state = holder.wait_for("", seconds)
    if state:
        return state
    if holder.failure:
        return holder.failure
    if holder.result:
        return ClusterctlError(" ".join(holder.result.err.split()) or "cannot be locked")
    return ClusterctlError(f"did not report within {_ANSWER:g} s whether it is locked")


def _since(seconds: int) -> str:
    if seconds < 0:  # the clock was set back, or another node's clock is ahead
        return "is running here"
    return "has been running here for " + (f"{seconds} s" if seconds < 120 else f"{seconds // 60} min")
