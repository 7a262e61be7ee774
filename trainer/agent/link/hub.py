"""Rank 0's end of the link: it listens, lets in who belongs to the run, and relays.

Anything may connect: a port scanner, another run's agent, garbage. A guest has ``DEADLINE`` seconds and ``HELLO`` bytes
a line to prove that it belongs to the run, there are slots for a limited number of guests (see ``guests.py``), and what
one of them did is only remembered, to be told when somebody is missed.

An agent of the run may be broken or lie. What it sends is checked before it is used, it speaks for its own rank only,
and it has an allowance of bytes: what exceeds it is dropped.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, Callable, Dict, Optional, Tuple

from contract.plan import Link, Plan
from link.allowance import Allowance
from link.end import End
from link.frames import MESSAGE, Connection, EndedError, NotOursError, Session, encode
from link.guests import Guest, Guests
from link.peer import Peer, whole
from link.proof import CLAIM, HELLO, StrangerError

SEEN = 8  # things remembered of guests that did not belong
ACCEPTED = 64  # connections accepted before the others' turn
OWN = ("lost", "gone", "back", "broken")  # kinds of messages that a link makes itself
INSTANCE = 64  # characters


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
        super().__init__(plan, link, [Peer(rank, node) for rank, node in enumerate(link.nodes) if rank], deliver)
        self.seen: Tuple[str, ...] = ()  # replaced whole: other threads read it
        self.conflict: Optional[str] = None  # two agents with the same rank
        self._instance = instance
        self._take_socket = take_socket
        self._guests = Guests(len(self.peers) + 1)
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
        """The same, and listen no more."""
        super().close(patience)
        self._listener.close()

    def _goodbye(self) -> None:
        super()._goodbye()
        self.loop.forget(self._listener)
        for guest in self._guests:
            self._guests.remove(guest)
            self._cut(guest.connection)

    def _tell_all(self, message: Dict[str, Any]) -> None:
        super()._tell_all(dict(message, node=self.node, rank=0))

    def _come(self, peer: Peer, message: Dict[str, Any]) -> None:
        kind = message.get("kind")
        if not isinstance(kind, str) or kind in OWN:
            raise NotOursError("sent a message of the kind %.40r" % (kind,))
        message = dict(message, node=peer.node, rank=peer.rank)
        body = encode(message)
        if not self._allowances[peer.rank].take(len(body), time.monotonic()):
            self._log("%s sends too much: dropped a message of the kind %.40r\n" % (peer.node, kind))
            return
        self._deliver(message)
        if not kind.startswith("_"):  # these are for rank 0 only
            self._relay(peer, body)

    def _news(self, peer: Peer, message: Dict[str, Any]) -> None:
        self._deliver(message)
        self._relay(peer, encode(message))

    def _relay(self, sender: Peer, body: bytes) -> None:
        for peer in self.peers.values():
            if peer is not sender:
                self._tell(peer, body)

    def _more(self, now: float) -> bool:
        for guest in self._guests:
            if now > guest.deadline:
                self._turn_away(guest, "connected and did not identify itself")
        return False

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTED):
            try:
                sock, address = self._listener.accept()
            except OSError:  # nobody is left, or there are no descriptors; the selector says when to try again
                return
            crowding = self._guests.crowded(address[0])
            if crowding is not None:
                self._turn_away(crowding, "connected and did not identify itself")
            try:
                self._invite(Guest(Connection(sock, HELLO), address[0], self.token))
            except OSError:  # it has gone already
                sock.close()

    def _invite(self, guest: Guest) -> None:
        self.loop.watch(guest.connection, lambda _: self._greet(guest))
        self._guests.add(guest)

    def _turn_away(self, guest: Guest, why: str) -> None:
        what = "%s %s" % (guest.address, why)
        if what not in self.seen:
            self.seen = (*self.seen, what)[-SEEN:]
        self._guests.remove(guest)
        self._cut(guest.connection)

    def _lose_stranger(self, connection: Connection, error: Exception) -> None:
        guest = self._guests.find(connection)
        if guest is None:
            return
        claimed = guest.host.claimed
        if isinstance(error, (NotOursError, StrangerError)):
            self._turn_away(guest, str(error))
        elif claimed and isinstance(error, EndedError) and error.by_peer:
            # it has seen this run's proof, and did not like it
            said = (claimed.rank, claimed.run)
            self._turn_away(guest, "claimed to be rank %s of run %s, but has another token" % said)
        else:
            self._turn_away(guest, "connected and disconnected (%s)" % error)

    def _greet(self, guest: Guest) -> None:
        """Go on with the greeting as far as the guest has come. Nothing is parsed before it has proved who it is."""
        connection = guest.connection
        connection.fill()
        while guest.host.session is None:
            line = connection.line()
            if line is None:
                break
            connection.send(guest.host.take(line))
        connection.flush()
        if guest.host.session is None:
            return
        connection.session = guest.host.session
        connection.limit = CLAIM
        hello = connection.message()
        if hello is not None:
            self._guests.remove(guest)
            self.loop.forget(connection)
            self._let_in(guest, hello)

    def _let_in(self, guest: Guest, hello: Dict[str, Any]) -> None:
        """Somebody has proved that it belongs to the run."""
        rank, instance = whole(hello.get("rank")), hello.get("instance")
        if rank is None or not isinstance(instance, str) or not 0 < len(instance) <= INSTANCE:
            raise NotOursError("did not identify its agent")
        peer = self.peers.get(rank)
        if peer is None:
            self._answer(guest, {"refused": "no other node of this run has rank %s" % rank})
        elif peer.instance not in ("", instance) and peer.connection is not None:
            said = (peer.address, guest.address, peer.rank, peer.node)
            self.conflict = "two nodes have the same rank: %s and %s both claim to be rank %d (%s)" % said
            self._answer(guest, {"refused": self.conflict})
        elif hello.get("purpose") != "link":
            self._answer(guest, {"welcome": True}, hello)
        else:
            self._join(peer, instance, guest, hello)

    def _join(self, peer: Peer, instance: str, guest: Guest, hello: Dict[str, Any]) -> None:
        """An agent has come, come back, or come in the stead of one that was killed."""
        if peer.known_as(instance):
            self._deliver({"kind": "_withdraw", "rank": peer.rank})
        peer.address = guest.address
        connection = guest.connection
        connection.limit = MESSAGE
        connection.say(encode({"welcome": True, "instance": self._instance, "received": peer.received}))
        received = whole(hello.get("received")) if hello.get("of") == self._instance else 0
        self._attach(peer, connection, received or 0)
        self._hear(peer, connection)

    def _answer(self, guest: Guest, message: Dict[str, Any], hello: Optional[Dict[str, Any]] = None) -> None:
        """Say the last word of the greeting; then the socket is for files, or no more."""
        connection = guest.connection
        connection.say(encode(message))
        with contextlib.suppress(EndedError):
            connection.flush()
            if hello is not None and not connection.waiting and not connection.rest():
                assert connection.session is not None
                self._take_socket(hello, connection.sock, connection.session)
                return
        connection.close()
