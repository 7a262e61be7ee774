"""Rank 0's end of the link: it listens, lets in who belongs to the run, and relays.

Anything may connect: a port scanner, another run's agent, garbage. A guest has ``DEADLINE`` seconds and ``HELLO`` bytes
to prove that it belongs to the run, there is room for a limited number of guests, and what one of them did is only
remembered, to be told when somebody is missed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from link.end import End
from link.frames import MESSAGE, Connection, EndedError, NotOursError, frame
from link.peer import Peer
from link.proof import DEADLINE, HELLO, Host, StrangerError

SEEN = 8  # things remembered of guests that did not belong


class _Guest:
    """A connection that has proved nothing yet."""

    def __init__(self, connection: Connection, address: str, token: str) -> None:
        self.connection = connection
        self.address = address
        self.host = Host(token)
        self.deadline = time.monotonic() + DEADLINE


class Hub(End):
    """See the module. ``take_socket(hello, sock)`` gets connections that are for files, not for messages.

    Raises:
        OSError: it cannot listen at ``address``, a family and a socket address.
    """

    def __init__(
        self,
        plan: Dict[str, Any],
        address: Tuple[Any, Any],
        instance: str,
        deliver: Callable[[Dict[str, Any]], None],
        take_socket: Callable[[Dict[str, Any], socket.socket], None],
    ) -> None:
        super().__init__(plan, [Peer(rank, node) for rank, node in enumerate(plan["link"]["nodes"]) if rank], deliver)
        self.seen: Tuple[str, ...] = ()  # replaced whole: other threads read it
        self.conflict: Optional[str] = None  # two agents with the same rank
        self._instance = instance
        self._take_socket = take_socket
        self._room = 64 + 4 * len(self.peers)
        self._guests: List[_Guest] = []
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
            self._cut(guest.connection)
        self._guests = []

    def _tell_all(self, message: Dict[str, Any]) -> None:
        super()._tell_all(dict(message, node=self.node, rank=0))

    def _come(self, peer: Peer, message: Dict[str, Any]) -> None:
        message = dict(message, node=peer.node, rank=peer.rank)
        self._deliver(message)
        if not str(message.get("kind")).startswith("_"):  # these are for rank 0 only
            self._relay(peer, message)

    def _news(self, peer: Peer, message: Dict[str, Any]) -> None:
        self._deliver(message)
        self._relay(peer, message)

    def _relay(self, sender: Peer, message: Dict[str, Any]) -> None:
        for peer in self.peers.values():
            if peer is not sender:
                self._tell(peer, message)

    def _more(self, now: float) -> bool:
        for guest in list(self._guests):
            if now > guest.deadline:
                self._turn_away(guest, "connected and did not say what it wants")
        return False

    def _accept(self, _: int) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:  # nobody is left, or there are no descriptors; the selector says when to try again
                return
            if len(self._guests) >= self._room:  # the first has had the longest time
                self._turn_away(self._guests[0], "connected and did not say what it wants")
            self._invite(_Guest(Connection(sock, HELLO), address[0], self.token))

    def _invite(self, guest: _Guest) -> None:
        self._guests.append(guest)
        self.loop.watch(guest.connection, lambda _: self._greet(guest))

    def _turn_away(self, guest: _Guest, why: str) -> None:
        what = "%s %s" % (guest.address, why)
        if what not in self.seen:
            self.seen = (*self.seen, what)[-SEEN:]
        self._guests.remove(guest)
        self._cut(guest.connection)

    def _greet(self, guest: _Guest) -> None:
        try:
            for message in guest.connection.receive():
                guest.connection.send(guest.host.take(message))
                if guest.host.hello is not None:
                    self._guests.remove(guest)
                    self.loop.forget(guest.connection)
                    self._let_in(guest, guest.host.hello)
                    return
            guest.connection.flush()
        except EndedError as error:
            claimed = guest.host.claimed
            if claimed and error.by_peer:  # it has seen this run's proof, and did not like it
                said = (claimed["rank"], claimed.get("run"))
                self._turn_away(guest, "said it was rank %s of run %s, and has another token" % said)
            else:
                self._turn_away(guest, "connected and ended (%s)" % error)
        except (NotOursError, StrangerError) as error:
            self._turn_away(guest, str(error))

    def _let_in(self, guest: _Guest, hello: Dict[str, Any]) -> None:
        """Somebody has proved that it belongs to the run."""
        connection = guest.connection
        peer = self.peers.get(hello["rank"])
        instance = str(hello.get("instance"))
        if peer is None:
            self._answer(connection, {"refused": "this run has no rank %s beside rank 0" % hello["rank"]})
        elif peer.instance not in ("", instance) and peer.connection is not None:
            said = (peer.address, guest.address, peer.rank, peer.node)
            self.conflict = "two nodes were given the same rank: %s and %s both say they are rank %d (%s)" % said
            self._answer(connection, {"refused": self.conflict})
        elif hello.get("purpose") != "link":
            self._answer(connection, {"welcome": True}, hello)
        else:
            self._join(peer, instance, guest, hello)

    def _join(self, peer: Peer, instance: str, guest: _Guest, hello: Dict[str, Any]) -> None:
        """An agent has come, come back, or come in the stead of one that was killed."""
        if peer.known_as(instance):
            self._deliver({"kind": "_withdraw", "rank": peer.rank})
        peer.address = guest.address
        guest.connection.limit = MESSAGE
        guest.connection.send(frame({"welcome": True, "instance": self._instance, "received": peer.received}))
        received = hello.get("received") if hello.get("of") == self._instance else 0
        self._attach(peer, guest.connection, received if isinstance(received, int) else 0)

    def _answer(self, connection: Connection, message: Dict[str, Any], hello: Optional[Dict[str, Any]] = None) -> None:
        """Say the last word of the greeting; then the socket is for files, or no more."""
        connection.send(frame(message))
        with contextlib.suppress(EndedError):
            connection.flush()
            if hello is not None and not connection.out:
                self._take_socket(hello, connection.sock)
                return
        connection.close()
