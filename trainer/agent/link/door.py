"""Where an agent listens for others: it accepts connections, and admits those that belong to the run.

Anything may connect: a port scanner, another run's agent, garbage. A pending connection has ``DEADLINE`` seconds and
``HELLO`` bytes per line to prove that it belongs to the run. The number of pending connections is limited. What a
rejected one did is remembered, and reported when an agent is missing.

Every address has a share of the slots, so an address that opens many connections displaces only its own. Within a
share, connections without a valid first line are dropped first, and among equals chance decides. A process on an
agent's machine that keeps opening connections cannot make sure that the agent's connection is dropped.
"""

from __future__ import annotations

import random
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from .endpoint import Loop
from .protocol import (
    CLAIM,
    DEADLINE,
    HELLO,
    MESSAGE,
    Connection,
    EndedError,
    Host,
    InvalidMessageError,
    UnknownPeerError,
)

SHARE = 16  # slots of one address, plus one for each node: all agents may share an address
ROOM = 64  # slots of all addresses together, plus four for each node

_RANDOM = random.SystemRandom()


class PendingConnection:
    """A connection that is not authenticated yet. ``address`` is the text for messages."""

    def __init__(self, connection: Connection, address: str, token: str) -> None:
        self.connection = connection
        self.address = address
        self.host = Host(token)
        self.deadline = time.monotonic() + DEADLINE


def _network(address: str) -> str:
    """The network that has one share: an IPv4 address, or an IPv6 /64, all of which one machine may use."""
    if ":" not in address:
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


class PendingConnections:
    """The connections that are not authenticated yet."""

    def __init__(
        self, nodes: int, choose: Callable[[List[PendingConnection]], PendingConnection] = _RANDOM.choice
    ) -> None:
        self._share = SHARE + nodes
        self._room = ROOM + 4 * nodes
        self._choose = choose
        self._all: Dict[int, PendingConnection] = {}  # by the connection's identity
        self._by_network: Dict[str, Dict[int, PendingConnection]] = {}

    def __iter__(self) -> Any:
        return iter(list(self._all.values()))

    def find(self, connection: Connection) -> Optional[PendingConnection]:
        """Find the pending connection with this ``Connection``."""
        return self._all.get(id(connection))

    def add(self, newcomer: PendingConnection) -> None:
        """Add one after ``crowded`` returned None."""
        self._all[id(newcomer.connection)] = newcomer
        self._by_network.setdefault(_network(newcomer.address), {})[id(newcomer.connection)] = newcomer

    def remove(self, newcomer: PendingConnection) -> None:
        """Remove one."""
        self._all.pop(id(newcomer.connection), None)
        network = _network(newcomer.address)
        same = self._by_network.get(network, {})
        same.pop(id(newcomer.connection), None)
        if not same:
            self._by_network.pop(network, None)

    def crowded(self, address: str) -> Optional[PendingConnection]:
        """The pending connection to drop before a connection from this address is added; None if there is room."""
        same = self._by_network.get(_network(address), {})
        if len(same) >= self._share:
            return self._one_of(same)
        if len(self._all) >= self._room:
            return self._one_of(max(self._by_network.values(), key=len))
        return None

    def _one_of(self, connections: Dict[int, PendingConnection]) -> PendingConnection:
        silent = [newcomer for newcomer in connections.values() if newcomer.host.claim is None]
        return self._choose(silent or list(connections.values()))


SEEN = 8  # remembered messages about rejected connections
ACCEPTED = 64  # connections accepted before others are served
WAITING = 512  # connections that the kernel completes before they are accepted


class Door:
    """See the module. Used by the thread of ``loop``.

    Args:
        loop: calls the handlers of the connections.
        token: of the run.
        nodes: the number of agents.
        address: a family and a socket address.
        admit: gets each connection that has proved itself, and its first message, unchecked.

    Raises:
        OSError: it cannot listen at ``address``.
    """

    def __init__(
        self,
        loop: Loop,
        token: str,
        nodes: int,
        address: Tuple[Any, Any],
        admit: Callable[[PendingConnection, Dict[str, Any]], None],
    ) -> None:
        self.rejections: Tuple[str, ...] = ()  # replaced whole: other threads read it
        self.pending = PendingConnections(nodes)
        self._loop, self._token, self._admit = loop, token, admit
        self._listener = socket.socket(address[0], socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address[1])
            self._listener.listen(WAITING)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._loop.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        """The port at which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    def stop(self) -> None:
        """Accept no more connections, and end those that are pending."""
        self._loop.forget(self._listener)
        for newcomer in self.pending:
            self.pending.remove(newcomer)
            self._cut(newcomer.connection)

    def close(self) -> None:
        """Free the port, once the loop has ended or after ``stop``."""
        self._listener.close()

    def expire(self, now: float) -> None:
        """Drop the connections that have not proved themselves in time."""
        for newcomer in self.pending:
            if now > newcomer.deadline:
                self.reject(newcomer, "connected and did not identify itself")

    def reject(self, newcomer: PendingConnection, why: str) -> None:
        """Close a pending connection, and keep the reason for the error about missing agents."""
        what = "%s %s" % (newcomer.address, why)
        if what not in self.rejections:
            self.rejections = (*self.rejections, what)[-SEEN:]
        self.pending.remove(newcomer)
        self._cut(newcomer.connection)

    def lose(self, connection: Connection, error: Exception) -> None:
        """Handle the failure of a connection, if it is pending here."""
        newcomer = self.pending.find(connection)
        if newcomer is None:
            return
        claim = newcomer.host.claim
        if isinstance(error, (InvalidMessageError, UnknownPeerError)):
            self.reject(newcomer, str(error))
        elif claim and isinstance(error, EndedError) and error.by_peer:
            # it left after this run's proof
            self.reject(newcomer, "claimed to be rank %s of run %s, but has another token" % (claim.rank, claim.run))
        else:
            self.reject(newcomer, "connected and disconnected (%s)" % error)

    def _cut(self, connection: Connection) -> None:
        self._loop.forget(connection)
        connection.close()

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTED):
            try:
                sock, address = self._listener.accept()
            except OSError:  # none is waiting, or there are no descriptors; the selector reports when to try again
                return
            crowding = self.pending.crowded(address[0])
            if crowding is not None:
                self.reject(crowding, "connected and did not identify itself")
            try:
                self._invite(PendingConnection(Connection(sock, HELLO), address[0], self._token))
            except OSError:  # it is already closed
                sock.close()

    def _invite(self, newcomer: PendingConnection) -> None:
        self._loop.watch(newcomer.connection, lambda _: self._greet(newcomer))
        self.pending.add(newcomer)

    def _greet(self, newcomer: PendingConnection) -> None:
        """Continue the handshake with the new data. Nothing is parsed before it is authenticated."""
        connection = newcomer.connection
        connection.fill()
        while newcomer.host.session is None:
            line = connection.line()
            if line is None:
                break
            connection.send(newcomer.host.take(line))
        connection.flush()
        if newcomer.host.session is None:
            return
        connection.session = newcomer.host.session
        connection.limit = CLAIM
        hello = connection.message()
        if hello is not None:
            self.pending.remove(newcomer)
            self._loop.forget(connection)
            connection.limit = MESSAGE
            self._admit(newcomer, hello)
