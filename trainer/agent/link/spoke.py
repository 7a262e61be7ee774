"""The link's end of every agent except the hub's: it connects to the hub, and reconnects until the link is closed.

The hub may send it to another agent, through which it is connected then; see ``relay.py``.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from typing import Any, Callable, Dict, Optional, Tuple, Union

from ..contract.plan import Link, Plan
from ..contract.untrusted import whole
from .endpoint import BEAT, End, Peer
from .protocol import (
    BYE,
    CLAIM,
    DEADLINE,
    HELLO,
    MESSAGE,
    Caller,
    Connection,
    InvalidMessageError,
    RefusedError,
    Route,
    UnknownPeerError,
    check_welcome,
    encode,
)
from .relay import Relay, address_of

SOON = 0.05  # seconds before the second try; doubled each time
LATER = 0.5  # at most
STALE = 5.0  # seconds of silence before a second connection; the first is kept until data arrives on one of them
STALE_RELAY = 2.5 * BEAT  # the same through another agent: less than any ``lost_after``
REACH = 2.0  # seconds for the handshake with another agent, and the hub's answer through it


def reason(error: OSError, place: str) -> str:
    """Why no connection to ``place`` is possible, and what that usually means."""
    if error.errno == errno.ECONNREFUSED:
        return "nothing listens at %s: the agent of rank 0 has not started, or has exited" % place
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route to %s: %s" % (place, error.strerror)
    if error.errno == errno.ETIMEDOUT:
        return no_answer(place)
    return "no connection to %s: %s" % (place, error.strerror or error)


def no_answer(place: str) -> str:
    """The message for a ``place`` that does not answer."""
    return "no answer from %s within %d s: is a firewall in between, or the machine down?" % (place, DEADLINE)


class _Try:
    """A connection attempt; ``relayed``: to another agent, which passes the frames on."""

    def __init__(self, connection: Connection, caller: Caller, relayed: bool) -> None:
        self.connection = connection
        self.caller = caller
        self.relayed = relayed
        self.deadline = time.monotonic() + (REACH if relayed else DEADLINE)
        self.connected = False


class Spoke(End):
    """See the module.

    ``attempt``: the connection that is being made; ``why``: why there is none; ``refused``: why the hub refuses one;
    ``tried``: how many attempts failed. ``relayed``: the connection leads through another agent; ``relay``: what this
    one does for others, in a large run.
    """

    def __init__(
        self,
        plan: Plan,
        link: Link,
        address: Tuple[Any, Any],
        place: str,
        instance: str,
        deliver: Callable[[Dict[str, Any]], None],
        hub: int = 0,
    ) -> None:
        self.hub = Peer(hub, link.nodes[hub])
        self.role = "rank 0" if hub == 0 else "the hub"
        super().__init__(plan, link, [self.hub], deliver)
        self.why = ""
        self.refused: Optional[str] = None
        self.tried = 0
        self._address = address
        self._place = place
        self._instance = instance
        self.attempt: Optional[_Try] = None
        self._next = 0.0
        self._pause = SOON
        self._direct = False  # no connection was possible to an agent to which the hub has sent this one
        self.relayed = False
        self._hub_closed = False  # that one says that the hub's kernel closed its connection
        self.relay: Optional[Relay] = None
        if self.many:
            self.relay = Relay(self.loop, self.token, len(link.nodes), self.hub, lambda: self._pump(self.hub))

    def _handle(self, _: Peer, message: Dict[str, Any]) -> None:
        if message.get("kind") not in ("broken", "refused"):  # only this agent's own link reports these
            self._deliver(message)

    def _news(self, _: Peer, message: Dict[str, Any]) -> None:
        self._deliver(message)

    def _take(self, peer: Peer, line: Dict[str, Any]) -> None:
        channel = whole(line.get("close"))
        if channel is not None and self.relay is not None:
            self.relay.close_channel(channel)
        if line.get("closed") is True and self.relayed:
            self._hub_closed = True
        super()._take(peer, line)

    def _take_routed(self, _: Peer, __: Connection, payload: bytes) -> None:
        if self.relay is not None:
            self.relay.pass_down(payload)

    def tick(self, now: float, late: float) -> bool:
        """Tick as ``End.tick``, also for the agents that this one serves."""
        beaten = self._beaten
        soon = super().tick(now, late)
        if self.relay is not None:
            self.relay.tick(now, self._beaten != beaten)
        return soon

    def _ready(self, peer: Peer, connection: Connection, events: int) -> None:
        super()._ready(peer, connection, events)
        if self.relay is not None:
            self.relay.resume()

    def _close(self) -> None:
        if self.many:  # numbered and acknowledged: an agent in between may end at the same time
            self._send(self.hub, encode({"kind": BYE}))
        super()._close()

    def _detach(self, peer: Peer, by_peer: bool) -> None:
        # Only the relay's process has ended, unless it has said that the hub's did.
        by_peer = self._hub_closed if self.relayed else by_peer
        super()._detach(peer, by_peer)
        if self.relay is not None:
            self.relay.end(hub_closed=by_peer)

    def say_goodbye(self) -> None:
        """End the connection, or the attempt to make one."""
        super().say_goodbye()
        self._end()

    def _end(self) -> None:
        if self.relay is not None:
            self.relay.stop()
        if self.attempt is not None:
            self._cut(self.attempt.connection)
            self.attempt = None

    def _more(self, now: float) -> bool:
        if self._over:
            return False
        if self.attempt is not None:
            if self.hub.connection is not None and now - self.hub.last_arrival < self._stale:
                self._cut(self.attempt.connection)  # data arrived on the old connection again
                self.attempt = None
            elif now > self.attempt.deadline:
                self._fail(self.attempt, no_answer(self._place))
        silent = self.hub.connection is None or now - self.hub.last_arrival >= self._stale
        wanted = silent and self.refused is None and not self.hub.left
        if wanted and self.attempt is None and now >= self._next:
            self._connect()
        return wanted

    @property
    def _stale(self) -> float:
        return STALE_RELAY if self.relayed else STALE

    def _connect(self, through: Optional[Tuple[Any, Any]] = None) -> None:
        """Connect to the hub, or ``through`` the agent at this address."""
        address = through or self._address
        try:
            sock = socket.socket(address[0], socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is free
            self.why = reason(error, self._place)
            self._next = time.monotonic() + LATER
            return
        caller = Caller(self.token, self.run, self.rank)
        attempt = self.attempt = _Try(Connection(sock, HELLO), caller, through is not None)
        code = sock.connect_ex(address[1])
        if code not in (0, errno.EINPROGRESS):
            self._fail(attempt, reason(OSError(code, os.strerror(code)), self._place))
            return
        attempt.connection.send(attempt.caller.first())
        self.loop.watch(attempt.connection, lambda events: self._greet(attempt, events))

    def _fail(self, attempt: _Try, why: str) -> None:
        self._cut(attempt.connection)
        self.attempt = None
        self.why = why
        self._next = time.monotonic() + self._pause
        self._pause = min(LATER, self._pause * 2)
        if attempt.relayed:
            self._direct = True  # the next attempt is the hub's
            return
        self.tried += 1
        self._deliver({"kind": "_connected"})

    def _abandon(self) -> None:
        super()._abandon()
        self._end()

    def _lose_unknown(self, connection: Union[Connection, Route], error: Exception) -> None:
        attempt = self.attempt
        if attempt is None or attempt.connection is not connection:
            if self.relay is not None and isinstance(connection, Connection):
                self.relay.lose(connection, error)
            return
        if isinstance(error, (InvalidMessageError, UnknownPeerError)):
            self._fail(attempt, "the process at %s is not an agent of this run: it %s" % (self._place, error))
        elif isinstance(error, RefusedError):
            self.refused = str(error)
            self._fail(attempt, "%s refuses this agent: %s" % (self.role, error))
            self._deliver({"kind": "refused", "text": self.refused, "node": self.hub.node})
        else:
            self._fail(attempt, "%s closed the connection: %s" % (self._place, error))

    def _greet(self, attempt: _Try, events: int) -> None:
        connection = attempt.connection
        if not attempt.connected:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == errno.ECONNREFUSED and self.many and not attempt.relayed:
                self._hub_has_exited()
            if code:
                self._fail(attempt, reason(OSError(code, os.strerror(code)), self._place))
                return
            attempt.connected = True
        if events & selectors.EVENT_READ:
            connection.fill()
        if connection.session is None:
            line = connection.line()
            if line is not None:
                self._claim(attempt, line)
        if connection.session is not None:
            answer = connection.message()
            if answer is not None and "through" in answer and not attempt.relayed:
                self._go_through(attempt, answer["through"])
                return
            if answer is not None:
                self._join(attempt, check_welcome(answer))
                return
        connection.flush()
        self.loop.watch(connection, lambda events: self._greet(attempt, events))

    def _hub_has_exited(self) -> None:
        """Record it, also if the connection ended with an agent in between, before that one could tell."""
        hub = self.hub
        if hub.instance and hub.connection is None and hub.closed is None:
            hub.detach(by_peer=True, now=time.monotonic())

    def _claim(self, attempt: _Try, line: bytes) -> None:
        """Authenticate this agent, and send its claim."""
        connection = attempt.connection
        connection.send(attempt.caller.take(line))
        connection.session = attempt.caller.session
        connection.limit = CLAIM
        hello: Dict[str, Any] = {"rank": self.rank, "instance": self._instance, "purpose": "link"}
        hello.update(of=self.hub.instance, received=self.hub.received)
        if self.relay is not None and not attempt.relayed:
            hello.update(relays=self.relay.listen(connection.sock.getsockname()[0]), direct=self._direct)
        connection.send_frame(encode(hello))

    def _go_through(self, attempt: _Try, through: Any) -> None:
        """Connect to the agent to which the hub sends this one."""
        try:
            address = address_of(through)
        except ValueError as error:
            raise InvalidMessageError("named an agent at an invalid address: %s" % error) from error
        self._cut(attempt.connection)
        self.attempt = None
        self._connect(address)

    def _join(self, attempt: _Try, welcome: Dict[str, Any]) -> None:
        connection = attempt.connection
        self.loop.forget(connection)
        self.attempt = None
        self.relayed, self._direct, self._hub_closed = attempt.relayed, False, False
        if self.relay is not None:
            self.relay.serve(None if attempt.relayed else connection)
        self._pause = SOON
        self._next = 0.0
        self.why = ""
        connection.limit = MESSAGE
        new = self.hub.known_as(str(welcome.get("instance"))[:CLAIM])
        self._attach(self.hub, connection, whole(welcome.get("received")) or 0)
        self._deliver({"kind": "_new_hub" if new else "_connected"})
        self._receive(self.hub, connection)
