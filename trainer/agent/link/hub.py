"""The hub's end of the link: it admits the agents of the run, and relays their messages.

The hub is the agent of the first node; if that is lost, another one, see ``election.py``.

In a large run only ``Link.width`` agents are connected to the hub. It sends each further one to one of these, which
passes its frames on (``relay.py``). An agent that cannot reach that one, or loses it, comes to the hub again.

An agent of the run may be broken or lie. The hub checks what it sends, lets it speak for its own rank and those that it
passes on only, and limits its bytes: what exceeds the limit is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import time
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

from ..contract.plan import Link, Plan
from ..contract.untrusted import whole
from .door import Door, PendingConnection
from .endpoint import BEAT, End, Peer
from .protocol import (
    BYE,
    READ,
    Connection,
    EndedError,
    InvalidMessageError,
    Route,
    Session,
    encode,
    parse,
    split_routed,
)

BURST = 32 << 20  # bytes at once; the largest message has 16 MiB
RATE = 4 << 20  # bytes per second in the long run
LEAST = 16 << 10  # minimal bytes that a message counts for: every one is relayed to all others


class Allowance:
    """A token bucket of bytes. It limits an agent that is broken or lies, and would fill the others' memory."""

    def __init__(self) -> None:
        self._room = float(BURST)
        self._at = 0.0

    def take(self, size: int, now: float) -> bool:
        """Whether a message of this size may pass now; if so, it is counted."""
        self._room = min(float(BURST), self._room + (now - self._at) * RATE)
        self._at = now
        size = max(size, LEAST)
        if size > self._room:
            return False
        self._room -= size
        return True


OWN = ("lost", "gone", "back", "broken")  # kinds of messages that only the link itself creates
INSTANCE = 64  # characters
ADDRESS = 64  # characters
FRESH = 2 * BEAT  # seconds since an agent was heard, after which no other one is sent to it


class _Passed(NamedTuple):
    """An agent that comes through another one; like a ``PendingConnection``."""

    connection: Route
    address: str


class Hub(End):
    """See the module. ``take_socket(hello, sock, session)`` gets connections that are for files, not for messages.

    Raises:
        OSError: it cannot listen at ``address``, a family and a socket address.
    """

    def __init__(
        self,
        plan: Plan,
        link: Link,
        address: Tuple[Any, Any],
        instance: str,
        deliver: Callable[[Dict[str, Any]], None],
        take_socket: Callable[[Dict[str, Any], socket.socket, Session], None],
    ) -> None:
        others = [Peer(rank, node) for rank, node in enumerate(link.nodes) if rank != plan.node_rank]
        super().__init__(plan, link, others, deliver)
        self.excluded: Dict[int, str] = {}  # by position, why the run continues without the node
        self.conflict: Optional[str] = None  # two agents with the same rank
        self._instance = instance
        self._take_socket = take_socket
        self._width = link.width
        self._turns = itertools.count()
        self._direct: Dict[int, Peer] = {}  # that have joined the hub itself
        self._rivals: Dict[int, Tuple[str, float]] = {}  # by position: who else wants to be it, and since when
        self._passed: Dict[Tuple[Connection, int], Peer] = {}  # by the connection and the channel of the route
        self._allowances = {rank: Allowance() for rank in self.peers}
        try:
            self.door = Door(self.loop, self.token, len(link.nodes), address, self._admit)
        except OSError:
            self.loop.stop(0)  # it was never started: this closes what it has
            raise

    def close(self, patience: float) -> None:
        """Close as ``End.close``, and stop listening."""
        super().close(patience)
        self.door.close()

    def say_goodbye(self) -> None:
        """End all connections, also those without a proof, and stop listening."""
        super().say_goodbye()
        self.door.stop()

    def abandon(self, patience: float) -> None:
        """Abandon as ``End.abandon``, and stop listening."""
        super().abandon(patience)
        self.door.close()

    def _abandon(self) -> None:
        super()._abandon()
        self.door.stop()

    def exclude(self, reasons: Dict[int, str]) -> None:
        """Refuse the agents at these positions from now on, each with a reason."""
        self.loop.post(lambda: self._exclude(dict(reasons)))

    def _exclude(self, reasons: Dict[int, str]) -> None:
        self.excluded = reasons
        for rank in reasons:
            peer = self.peers.get(rank)
            if peer is not None:
                peer.exclude()
                connection, peer.connection = peer.connection, None
                if connection is not None:
                    self._cut(connection)

    def _send_all(self, message: Dict[str, Any]) -> None:
        message = dict(message, node=self.node, rank=self.rank)
        to = message.get("to")
        if to is None:
            super()._send_all(message)
        elif to in self.peers:
            self._send(self.peers[to], encode(message))

    def _handle(self, peer: Peer, message: Dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == BYE:
            peer.left = True
            return
        if not isinstance(kind, str) or kind in OWN:
            raise InvalidMessageError("sent a message of the kind %.40r" % (kind,))
        message = dict(message, node=peer.node, rank=peer.rank)
        body = encode(message)
        if not self._allowances[peer.rank].take(len(body), time.monotonic()):
            self._log("%s sends too much: dropped a message of the kind %.40r\n" % (peer.node, kind))
            return
        to = whole(message.get("to"))
        if to is None or to == self.rank:
            self._deliver(message)
        elif to in self.peers and not kind.startswith("_"):
            self._send(self.peers[to], body)
        if to is None and not kind.startswith("_"):  # those are for the hub only
            self._relay(peer, body)

    def _news(self, peer: Peer, message: Dict[str, Any]) -> None:
        self._deliver(message)
        self._relay(peer, encode(message))

    def _relay(self, sender: Peer, body: bytes) -> None:
        for peer in self.peers.values():
            if peer is not sender:
                self._send(peer, body)

    def _more(self, now: float) -> bool:
        self.door.expire(now)
        return False

    def _lose_unknown(self, connection: Union[Connection, Route], error: Exception) -> None:
        if isinstance(connection, Connection):
            self.door.lose(connection, error)

    def _admit(self, newcomer: Union[PendingConnection, _Passed], hello: Dict[str, Any]) -> None:
        """Admit an authenticated connection."""
        rank, instance = whole(hello.get("rank")), hello.get("instance")
        if rank is None or not isinstance(instance, str) or not 0 < len(instance) <= INSTANCE:
            raise InvalidMessageError("did not identify its agent")
        peer = self.peers.get(rank)
        taken = peer is not None and self._is_taken(peer, instance)
        if rank in self.excluded:
            self._answer(newcomer, {"refused": self.excluded[rank]})
        elif peer is None:
            self._answer(newcomer, {"refused": "no other node of this run has rank %s" % rank})
        elif taken is None:
            newcomer.connection.close()  # it comes again
        elif taken:
            who = (peer.address, newcomer.address, peer.rank, peer.node)
            self.conflict = "two nodes have the same rank: %s and %s both claim to be rank %d (%s)" % who
            self._answer(newcomer, {"refused": self.conflict})
        elif hello.get("purpose") != "link":
            self._answer(newcomer, {"welcome": True}, hello)
        else:
            relay = self._relay_for(peer, newcomer, hello)
            if relay is None:
                self._join(peer, instance, newcomer, hello)
            else:
                self._answer(newcomer, {"through": relay})

    def _is_taken(self, peer: Peer, instance: str) -> Optional[bool]:
        """Whether another process is this agent. None: not known yet, because it is connected through another agent.

        That one tells about its end a moment after it. So it must be heard again, or be silent for ``FRESH`` seconds.
        """
        if peer.instance in ("", instance) or peer.connection is None:
            return False
        if isinstance(peer.connection, Connection):
            return True
        now = time.monotonic()
        rival, since = self._rivals.get(peer.rank, ("", now))
        if rival != instance:
            since = now
            self._rivals[peer.rank] = (instance, since)
        if peer.last_arrival > since + BEAT:
            return True
        return False if now - peer.last_arrival > FRESH else None

    def _relay_for(
        self, peer: Peer, newcomer: Union[PendingConnection, _Passed], hello: Dict[str, Any]
    ) -> Optional[Tuple[str, int]]:
        """The address of the agent through which a new one is to come; None: it stays connected to the hub itself."""
        if isinstance(newcomer.connection, Route) or hello.get("direct") or not self.many:
            return None
        connected = [each for each in self._direct.values() if isinstance(each.connection, Connection)]
        self._direct = {each.rank: each for each in connected}
        direct = [each for each in connected if each is not peer]
        if len(direct) < self._width:
            return None
        now = time.monotonic()
        left = peer.connection.carrier if peer.connection is not None else None  # the agent gives this way up
        fit = [
            each
            for each in direct
            if each.relays is not None and now - each.last_arrival < FRESH and each.connection is not left
        ]
        if not fit:
            return None
        chosen = fit[next(self._turns) % len(fit)]
        assert chosen.relays is not None
        return chosen.address, chosen.relays

    def _join(
        self, peer: Peer, instance: str, newcomer: Union[PendingConnection, _Passed], hello: Dict[str, Any]
    ) -> None:
        """Connect an agent that is new, reconnects, or replaces one that was killed."""
        known = hello.get("of") == self._instance
        if not peer.known_as(instance) and not known:
            peer.restart()  # in an election an agent may leave this hub and come back: its new end knows no numbers
        if not known:
            self._deliver({"kind": "_withdraw", "rank": peer.rank})
        peer.address = newcomer.address
        connection = newcomer.connection
        if isinstance(connection, Connection):
            port = whole(hello.get("relays"))
            peer.relays = port if port is not None and 0 < port < 1 << 16 else None
            self._direct[peer.rank] = peer
        connection.send_frame(encode({"welcome": True, "instance": self._instance, "received": peer.received}))
        received = whole(hello.get("received")) if known else 0
        if isinstance(connection, Route):
            self._passed[connection.carrier, connection.channel] = peer
        self._attach(peer, connection, received or 0)
        self._deliver({"kind": "_connected"})
        if isinstance(connection, Connection):
            self._receive(peer, connection)

    def _answer(
        self,
        newcomer: Union[PendingConnection, _Passed],
        message: Dict[str, Any],
        hello: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Send the last message of the handshake; then the socket is used for files, or closed."""
        connection = newcomer.connection
        connection.send_frame(encode(message))
        with contextlib.suppress(EndedError):
            connection.carrier.flush()
            if isinstance(connection, Connection) and hello and not connection.waiting and not connection.rest():
                assert connection.session is not None
                self._take_socket(hello, connection.sock, connection.session)
                return
        connection.close()

    def _take_routed(self, relay: Peer, carrier: Connection, payload: bytes) -> None:
        channel, rest = split_routed(payload)
        passed = self._passed.get((carrier, channel))
        if passed is None and carrier.waiting >= READ:  # no newcomers: the agent in between does not read the answers
            return
        route = Route(carrier, channel)
        try:
            line = parse(rest)
            hello = line.get("hello")
            if passed is not None:
                passed.last_arrival = time.monotonic()
                self._take(passed, line)
                self._pump(passed)
            elif isinstance(hello, dict):
                self._admit(_Passed(route, "%.*s, through %s" % (ADDRESS, line.get("address"), relay.node)), hello)
        except Exception as error:  # noqa: BLE001 - of the agent that is passed on, not of the one that does it
            self._lose((passed and passed.connection) or route, error)

    def _take(self, peer: Peer, line: Dict[str, Any]) -> None:
        """Take a line; an agent that passes frames on also tells whom it has heard, and whose connection has ended."""
        connection = peer.connection
        super()._take(peer, line)
        if not isinstance(connection, Connection):
            return
        heard = line.get("alive")
        for channel in heard if isinstance(heard, list) else ():
            passed = self._passed.get((connection, channel)) if isinstance(channel, int) else None
            if passed is not None:
                passed.last_arrival = time.monotonic()
        closed = whole(line.get("closed"))
        passed = self._passed.pop((connection, closed), None) if closed is not None else None
        if passed is not None:
            passed.detach(line.get("by_peer") is True, time.monotonic())

    def _ready(self, peer: Peer, connection: Connection, events: int) -> None:
        super()._ready(peer, connection, events)
        if events & selectors.EVENT_WRITE:  # there may be room for those that come through it
            for passed in [each for key, each in self._passed.items() if key[0] is connection]:
                self._pump(passed)

    def _cut(self, connection: Union[Connection, Route]) -> None:
        if isinstance(connection, Route):
            self._passed.pop((connection.carrier, connection.channel), None)
        else:
            for key in [key for key in self._passed if key[0] is connection]:
                self._passed.pop(key).detach(by_peer=False, now=time.monotonic())
        super()._cut(connection)
