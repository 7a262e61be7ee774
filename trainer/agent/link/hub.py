"""The hub's end of the link: it listens, admits the agents of the run, relays their messages and decides in meetings.

The hub is the agent of the first node; if that is lost, another one, see ``election.py``.

Anything may connect: a port scanner, another run's agent, garbage. A pending connection has ``DEADLINE`` seconds and
``HELLO`` bytes per line to prove that it belongs to the run. The number of pending connections is limited. What a
rejected one did is remembered, and reported when an agent is missing.

Every address has a share of the slots, so an address that opens many connections displaces only its own. Within a
share, connections without a valid first line are dropped first, and among equals chance decides. A process on an
agent's machine that keeps opening connections cannot make sure that the agent's connection is dropped.

An agent of the run may be broken or lie. The hub checks what it sends, lets it speak for its own rank only, and limits
its bytes: what exceeds the limit is dropped.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Tuple

from ..contract.plan import Link, Plan
from ..contract.untrusted import whole
from . import HubLostError, LinkError, Tolerance
from .endpoint import LOOK, End, Peer
from .link import plain_values
from .protocol import (
    CLAIM,
    DEADLINE,
    HELLO,
    MESSAGE,
    Connection,
    EndedError,
    Host,
    InvalidMessageError,
    Session,
    UnknownPeerError,
    encode,
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
OWN = ("lost", "gone", "back", "broken")  # kinds of messages that only the link itself creates
INSTANCE = 64  # characters
AHEAD = 20  # meetings that an agent may be ahead of the hub: more than those of an attempt


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
        self.rejections: Tuple[str, ...] = ()  # replaced whole: other threads read it
        self.conflict: Optional[str] = None  # two agents with the same rank
        self._instance = instance
        self._take_socket = take_socket
        self.pending = PendingConnections(len(self.peers) + 1)
        self._allowances = {rank: Allowance() for rank in self.peers}
        self._listener = socket.socket(address[0], socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address[1])
            self._listener.listen(512)
        except OSError:
            self._listener.close()
            self.loop.stop(0)  # it was never started: this closes what it has
            raise
        self._listener.setblocking(False)
        self.loop.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self, patience: float) -> None:
        """Close as ``End.close``, and stop listening."""
        super().close(patience)
        self._listener.close()

    def say_goodbye(self) -> None:
        """End all connections, also those without a proof, and stop listening."""
        super().say_goodbye()
        self._stop_listening()

    def abandon(self, patience: float) -> None:
        """Abandon as ``End.abandon``, and stop listening."""
        super().abandon(patience)
        self._listener.close()

    def _abandon(self) -> None:
        super()._abandon()
        self._stop_listening()

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

    def _stop_listening(self) -> None:
        self.loop.forget(self._listener)
        for newcomer in self.pending:
            self.pending.remove(newcomer)
            self._cut(newcomer.connection)

    def _send_all(self, message: Dict[str, Any]) -> None:
        message = dict(message, node=self.node, rank=self.rank)
        to = message.get("to")
        if to is None:
            super()._send_all(message)
        elif to in self.peers:
            self._send(self.peers[to], encode(message))

    def _handle(self, peer: Peer, message: Dict[str, Any]) -> None:
        kind = message.get("kind")
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
        for newcomer in self.pending:
            if now > newcomer.deadline:
                self.reject(newcomer, "connected and did not identify itself")
        return False

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
                self._invite(PendingConnection(Connection(sock, HELLO), address[0], self.token))
            except OSError:  # it is already closed
                sock.close()

    def _invite(self, newcomer: PendingConnection) -> None:
        self.loop.watch(newcomer.connection, lambda _: self._greet(newcomer))
        self.pending.add(newcomer)

    def reject(self, newcomer: PendingConnection, why: str) -> None:
        """Close a pending connection, and keep the reason for the error about missing agents."""
        what = "%s %s" % (newcomer.address, why)
        if what not in self.rejections:
            self.rejections = (*self.rejections, what)[-SEEN:]
        self.pending.remove(newcomer)
        self._cut(newcomer.connection)

    def _lose_unknown(self, connection: Connection, error: Exception) -> None:
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
            self.loop.forget(connection)
            self._admit(newcomer, hello)

    def _admit(self, newcomer: PendingConnection, hello: Dict[str, Any]) -> None:
        """Admit an authenticated connection."""
        rank, instance = whole(hello.get("rank")), hello.get("instance")
        if rank is None or not isinstance(instance, str) or not 0 < len(instance) <= INSTANCE:
            raise InvalidMessageError("did not identify its agent")
        peer = self.peers.get(rank)
        if rank in self.excluded:
            self._answer(newcomer, {"refused": self.excluded[rank]})
        elif peer is None:
            self._answer(newcomer, {"refused": "no other node of this run has rank %s" % rank})
        elif peer.instance not in ("", instance) and peer.connection is not None:
            who = (peer.address, newcomer.address, peer.rank, peer.node)
            self.conflict = "two nodes have the same rank: %s and %s both claim to be rank %d (%s)" % who
            self._answer(newcomer, {"refused": self.conflict})
        elif hello.get("purpose") != "link":
            self._answer(newcomer, {"welcome": True}, hello)
        else:
            self._join(peer, instance, newcomer, hello)

    def _join(self, peer: Peer, instance: str, newcomer: PendingConnection, hello: Dict[str, Any]) -> None:
        """Connect an agent that is new, reconnects, or replaces one that was killed."""
        known = hello.get("of") == self._instance
        if not peer.known_as(instance) and not known:
            peer.restart()  # in an election an agent may leave this hub and come back: its new end knows no numbers
        if not known:
            self._deliver({"kind": "_withdraw", "rank": peer.rank})
        peer.address = newcomer.address
        connection = newcomer.connection
        connection.limit = MESSAGE
        connection.send_frame(encode({"welcome": True, "instance": self._instance, "received": peer.received}))
        received = whole(hello.get("received")) if known else 0
        self._attach(peer, connection, received or 0)
        self._deliver({"kind": "_connected"})
        self._receive(peer, connection)

    def _answer(
        self, newcomer: PendingConnection, message: Dict[str, Any], hello: Optional[Dict[str, Any]] = None
    ) -> None:
        """Send the last message of the handshake; then the socket is used for files, or closed."""
        connection = newcomer.connection
        connection.send_frame(encode(message))
        with contextlib.suppress(EndedError):
            connection.flush()
            if hello is not None and not connection.waiting and not connection.rest():
                assert connection.session is not None
                self._take_socket(hello, connection.sock, connection.session)
                return
        connection.close()


Offers = Dict[int, Dict[str, Any]]
JOIN = 8.0  # seconds in which the agents connect to an elected hub; without a hub they notice its loss in 3 s


class _Offer(NamedTuple):
    number: int  # by which the agent recognises the answer
    topic: int
    content: Dict[str, Any]


class HubMeeting:
    """The hub's side. ``take`` is called with ``changed`` held.

    ``lost``: for an elected hub, the positions of lost hubs, for which it does not wait unless they connect.
    """

    def __init__(
        self, hub: Hub, place: str, changed: threading.Condition, lost: Optional[Collection[int]] = None
    ) -> None:
        self._hub = hub
        self._place = place
        self._changed = changed
        self._join_until = float("inf") if lost is None else time.monotonic() + JOIN
        self._lost = frozenset(lost or ())
        self.offers: Dict[int, _Offer] = {}

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """Handle an offer or its withdrawal."""
        number, topic = whole(message.get("number")), whole(message.get("topic", 0))
        if kind == "_offer" and isinstance(message.get("offer"), dict) and number is not None and topic is not None:
            self.offers[message["rank"]] = _Offer(number, topic, message["offer"])
        elif kind == "_withdraw":
            self.offers.pop(message["rank"], None)

    def meet(
        self,
        offer: Dict[str, Any],
        decide: Callable[[Offers], Dict[str, Any]],
        limit: float,
        alive: Callable[[], bool],
        topic: int = 0,
        tolerance: Optional[Tolerance] = None,
    ) -> Dict[str, Any]:
        """See ``Link.meet``."""
        try:
            if tolerance is None:
                self._wait(limit, alive, topic)
            else:
                self._wait_for_most(limit, alive, topic, tolerance)
            with self._changed:
                offers = {self._hub.rank: offer}
                offers.update((rank, one.content) for rank, one in self.offers.items() if one.topic == topic)
                ahead = any(topic < one.topic <= topic + AHEAD for one in self.offers.values())
            if ahead and tolerance is not None:
                decision: Dict[str, Any] = {"skip": True}
            else:
                decision = plain_values(decide(dict(sorted(offers.items()))))
        except HubLostError:
            raise
        except Exception as error:
            self._answer({"refused": "%s: %s" % (self._hub.node, error)}, topic)
            raise
        self._answer({"decision": decision}, topic)
        return decision

    def _answer(self, answer: Dict[str, Any], topic: int) -> None:
        """Answer the offers for this meeting, and those for earlier ones: these agents must catch up."""
        with self._changed:
            for rank, one in list(self.offers.items()):
                if one.topic <= topic:
                    content = answer if one.topic == topic else {"decision": {"skip": True}}
                    self._hub.send_to(rank, dict(content, kind="_answer", number=one.number))
                    del self.offers[rank]

    def _wait(self, limit: float, alive: Callable[[], bool], topic: int) -> None:
        """Wait until all agents are here."""

        def all_here() -> bool:
            return self._all_here(topic)

        while not all_here():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0:
                raise LinkError(self._who_is_missing())
            with self._changed:
                self._changed.wait_for(all_here, min(LOOK, left))

    def _wait_for_most(self, limit: float, alive: Callable[[], bool], topic: int, tolerance: Tolerance) -> None:
        """Wait until every agent is here or lost.

        Raises:
            HubLostError: too few are left.
        """

        def settled() -> bool:
            here = 1 + sum(1 for one in self.offers.values() if one.topic >= topic)
            all_here = tolerance.agents is not None and here >= tolerance.agents
            return all_here or not self._awaited(topic, limit, tolerance.silence())

        while not settled():
            if not alive():
                raise LinkError("cancelled")
            self._answer_late(topic)
            with self._changed:
                self._changed.wait_for(settled, LOOK)
        here = {self._hub.rank} | {rank for rank, one in self.offers.items() if one.topic >= topic}
        if not tolerance.enough(here):
            raise HubLostError(
                "%s is connected to %d of the run's %d agents" % (self._hub.node, len(here), len(self._hub.peers) + 1)
            )

    def _answer_late(self, topic: int) -> None:
        """Let agents that are still in an earlier meeting catch up: the hub that they had was lost."""
        if any(one.topic < topic for one in self.offers.values()):
            self._answer({"decision": {"skip": True}}, topic - 1)

    def _awaited(self, topic: int, limit: float, silence: float) -> List[int]:
        """The agents that may still come."""
        now = time.monotonic()
        waiting = []
        for rank, peer in self._hub.peers.items():
            here = rank in self.offers and self.offers[rank].topic >= topic
            lost = peer.gone or peer.left or now > limit
            if not peer.instance:
                lost = lost or rank in self._lost or now > self._join_until
            else:
                lost = lost or now - peer.last_arrival > silence
            if not here and not lost:
                waiting.append(rank)
        return waiting

    def _all_here(self, topic: int) -> bool:
        gone = [peer.node for peer in self._hub.peers.values() if peer.gone or peer.left]
        if gone:
            raise LinkError("the agent of %s exited; see its agent.log" % ", ".join(gone))
        here = all(rank in self.offers and self.offers[rank].topic == topic for rank in self._hub.peers)
        if self._hub.conflict and not here:
            raise LinkError(self._hub.conflict)
        return here

    def _who_is_missing(self) -> str:
        hub = self._hub
        missing = [rank for rank in hub.peers if rank not in self.offers]
        unseen = [hub.peers[rank].node for rank in missing if not hub.peers[rank].instance]
        reasons = []
        if unseen:
            reasons.append(
                "no connection from %s to %s: is a firewall in between, or did the agent not start?"
                % (", ".join(unseen), self._place)
            )
        for rank in missing:
            peer = hub.peers[rank]
            if peer.instance and peer.connection is None:
                reasons.append("%s was connected, but is not now." % peer.node)
            elif peer.instance:
                reasons.append("%s is connected, but not ready." % peer.node)
        if hub.rejections:
            reasons.append("Other connections: %s." % "; ".join(hub.rejections))
        return " ".join(reasons)
