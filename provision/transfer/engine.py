"""The transfer: surveys nodes, forms chains, sends to them, and works around failures until every node is done.

Every chain has its own thread. If a chain ends early, its nodes are surveyed again and form new chains for the missing
parts; other chains are not affected.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, InterruptedByUser
from provision.model import Emit, Inventory, Notice, Part, Progress, Wire, ignore
from provision.ssh.openssh import bulk
from provision.ssh.wire import NodeUnreachable
from provision.transfer import keys
from provision.transfer.chain import QUIET, UNIT, Chain, ChainNode, Digest, Outcome
from provision.transfer.nodes import Member, Target, Transferred, assign_blame
from provision.transfer.prepare import Preparation, ask, on_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from provision.model import Node, Remote
    from provision.ssh.remote import Connections

STALL = 60.0  # seconds without a report until a node counts as failed
RELAY_FROM = 64 << 20  # bytes for all nodes together; fewer are sent directly, which needs no keys on the nodes
CHAINS = 16  # chains that this machine sends to at the same time
_TICK = 0.25  # seconds between two checks of the chains
_PROGRESS = 0.1  # seconds between two events
_FORGET = 30.0  # seconds for a node to remove its keys


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a transfer runs.

    Attributes:
        relay: whether nodes may pass bytes on at all.
        stage: the stage of the ``Progress`` events, whose total is the bytes that all nodes lack.
        emit: receives progress, and warnings about nodes that failed.
        stall: seconds without a report until a node counts as failed.
        relay_from: bytes for all nodes together; fewer are sent directly.
        unit: bytes that are verified and passed on as one; a node briefly stores two copies.
    """

    relay: bool = True
    stage: str = "send"
    emit: Emit = ignore
    stall: float = STALL
    relay_from: int = RELAY_FROM
    unit: int = UNIT


def transfer(
    inventory: Inventory,
    targets: Sequence[Target],
    connections: Connections,
    parts: Mapping[Wire, Sequence[Part]],
    options: Options | None = None,
) -> Transferred:
    """Send every target the parts that its ``have`` does not name; a node that fails does not stop the others.

    Nodes of a wire form pass units on to one another. An interrupted transfer continues with the files in the targets'
    folders. No other program may use a target's ``into``: a range is written into the file of its path, and the rest of
    that file stays unchanged.

    Args:
        inventory: the cluster; its root and the targets' folders name the relay's keys.
        targets: the nodes, in the order in which they pass bytes on.
        connections: connections to the nodes.
        parts: all parts by wire form, in the order in which they are unpacked.
        options: the stage, limits and the receiver of events.

    Raises:
        ClusterctlError: a part's bytes are damaged; every stream was aborted.
        InterruptedByUser: Ctrl-C, after every stream was aborted and the keys were removed.
    """
    run = _Transfer(inventory, targets, connections, parts, options or Options())
    try:
        run.run()
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted", hint="run the same command again") from None
    finally:
        run.stop()
        run.clean()
    return Transferred({member.name: member.error for member in run.members}, run.sent)


def clean(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, scope: str
) -> dict[str, ClusterctlError | None]:
    """Remove the relay keys and processes that killed transfers have left on nodes.

    Args:
        inventory: the cluster.
        nodes: the nodes to clean.
        connections: connections to them.
        scope: the parent folder of those transfers' ``Target.folder``; the caller must hold its lock. Keys of other
            scopes are removed only when they are days old.

    Returns:
        By node name None, or why the cleaning failed.
    """

    def forget(node: Node) -> None:
        ask(connections, node, keys.forget(inventory, scope), deadline=_FORGET)

    return on_each(nodes, forget)


class _Transfer:
    """One running transfer."""

    def __init__(
        self,
        inventory: Inventory,
        targets: Sequence[Target],
        connections: Connections,
        parts: Mapping[Wire, Sequence[Part]],
        options: Options,
    ) -> None:
        self.members = [Member(target, number) for number, target in enumerate(targets)]
        self._by_name = {member.name: member for member in self.members}
        self._inventory = inventory
        self._connections = connections
        self._parts = parts
        self._options = options
        self._preparation = Preparation(inventory, connections, self._warn)
        self._relay = False
        self._slots = threading.Semaphore(CHAINS)
        self._changed = threading.Condition()
        self._emitting = threading.Lock()
        self._chains: list[Chain] = []  # running ones
        self._active = 0  # threads
        self._sent = 0  # bytes, by chains that have ended
        self._failure: BaseException | None = None
        self._stopped = False
        self._emitted_at = 0.0
        self._done = 0

    @property
    def sent(self) -> int:
        """The number of bytes that this machine sent."""
        return self._sent + sum(chain.sent for chain in self._chains)

    def run(self) -> None:
        """Send everything; at the end, a member that lacks parts has an error."""
        self._preparation.survey(self.members)
        for member in self.members:
            member.update(self._parts.get(member.target.wire, ()))
        needed = sum(member.needed or 0 for member in self.members if not member.error)
        self._relay = self._options.relay and needed >= self._options.relay_from
        self._progress(force=True)
        for wire in dict.fromkeys(member.target.wire for member in self.members):
            members = [member for member in self.members if member.target.wire == wire]
            self._spawn(partial(self._serve, members))
        with self._changed:
            while self._active and not self._failure:
                self._changed.wait(_TICK)
                for chain in self._chains:
                    chain.check(self._options.stall)
        if self._failure:
            raise self._failure
        self._progress(force=True)

    def stop(self) -> None:
        """Abort the running chains and wait briefly for them."""
        self._stopped = True
        until = time.monotonic() + 2 * QUIET
        with self._changed:
            while self._active and time.monotonic() < until:
                for chain in self._chains:
                    chain.abort()
                    chain.check(self._options.stall)
                self._changed.wait(_TICK)

    def clean(self) -> None:
        """Remove keys and processes of the transfer from the nodes that answer.

        The next transfer cleans the other nodes; their keys expire.
        """
        reachable = [
            member
            for member in self.members
            if (member.authorized or member.facts.left or member.lacking)
            and not isinstance(member.error, NodeUnreachable)
        ]

        def forget(member: Member) -> None:
            folder = member.target.folder
            script = keys.forget(self._inventory, keys.scope_of(folder), folder)
            ask(self._connections, member.target.node, script, deadline=_FORGET)

        on_each(reachable, forget)

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                with self._changed:
                    self._failure = self._failure or error
            finally:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

        with self._changed:
            self._active += 1
        threading.Thread(target=run, daemon=True).start()

    def _serve(self, members: Sequence[Member]) -> None:
        """Form chains of surveyed nodes and start a thread for each."""
        members = [member for member in members if member.lacking and not member.error]
        if not members or self._stopped:
            return
        stream, digest, chains = self._preparation.form(members, relay=self._relay)
        for chain in chains:
            self._spawn(partial(self._feed, chain, stream, digest))

    def _feed(self, members: Sequence[Member], stream: str, digest: Digest) -> None:
        """Send to one chain, and then what its nodes still lack."""
        with self._slots:
            if self._stopped:
                return
            nodes = [ChainNode(member.target, member.number, member.lacking, member.facts.kept) for member in members]
            parts = self._parts.get(members[0].target.wire, ())
            chain = Chain(nodes, parts, stream, digest, self._on_got, self._options.unit)
            head = members[0].target.node
            with self._changed:
                self._chains.append(chain)
            try:
                with self._connection(head) as remote:
                    outcome = chain.run(remote)
            except NodeUnreachable as error:
                outcome = Outcome(error=error)
            finally:
                with self._changed:
                    self._chains.remove(chain)
                    self._sent += chain.sent
        if self._stopped:
            return
        for member in members:
            if member.name in outcome.ended:
                member.facts = replace(member.facts, have=member.facts.have | member.lacking)
                member.update(parts)
        rest = [member for member in members if member.lacking]
        if not rest:
            return
        for sentence in assign_blame(members, outcome, self._preparation.refused, self._options.stall):
            self._warn(sentence)
        rest = [member for member in rest if not member.error]
        self._preparation.survey(rest)
        for member in rest:
            if not member.error:
                member.update(parts)
        self._serve(rest)

    @contextmanager
    def _connection(self, head: Node) -> Iterator[Remote]:
        """A chain's own connection to its first node: closing it must not end the one with the command's lock."""
        shared = self._connections[head]
        remote = bulk(self._inventory, head, shared)
        if remote is shared:
            remote = self._connections.open_separate(head)
        try:
            yield remote
        finally:
            remote.close()

    # --- events ------------------------------------------------------------------------------------------

    def _warn(self, sentence: str) -> None:
        with self._emitting:
            self._options.emit(Notice(sentence, "warning"))

    def _on_got(self, name: str, size: int) -> None:
        with self._emitting:
            self._by_name[name].arrived += size
            self._progress()

    def _progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._emitted_at < _PROGRESS:
            return
        self._emitted_at = now
        total = sum(member.needed or 0 for member in self.members)
        done = sum(min(member.arrived, member.needed or 0) for member in self.members)
        self._done = max(self._done, done)
        self._options.emit(Progress(self._options.stage, self._done, total))
