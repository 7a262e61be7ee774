"""The link's end of every agent except the hub's: it connects to the hub, and reconnects until the link is closed."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterator, Optional, Tuple, Type

from ..contract.plan import Link, Plan
from ..contract.untrusted import whole
from . import HubLostError, LinkError, RefusedLinkError, Tolerance
from .endpoint import LOOK, End, Peer
from .protocol import (
    CLAIM,
    DEADLINE,
    HELLO,
    MESSAGE,
    Caller,
    Connection,
    InvalidMessageError,
    RefusedError,
    UnknownPeerError,
    check_welcome,
    encode,
)

SOON = 0.05  # seconds before the second try; doubled each time
LATER = 0.5  # at most
STALE = 5.0  # seconds of silence before a second connection; the first is kept until data arrives on one of them


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
    """A connection attempt."""

    def __init__(self, connection: Connection, caller: Caller) -> None:
        self.connection = connection
        self.caller = caller
        self.deadline = time.monotonic() + DEADLINE
        self.connected = False


class Spoke(End):
    """See the module.

    ``attempt``: the connection that is being made; ``why``: why there is none; ``refused``: why the hub refuses one;
    ``tried``: how many attempts failed.
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

    def _handle(self, _: Peer, message: Dict[str, Any]) -> None:
        if message.get("kind") not in ("broken", "refused"):  # only this agent's own link reports these
            self._deliver(message)

    def _news(self, _: Peer, message: Dict[str, Any]) -> None:
        self._deliver(message)

    def say_goodbye(self) -> None:
        """End the connection, or the attempt to make one."""
        super().say_goodbye()
        if self.attempt is not None:
            self._cut(self.attempt.connection)
            self.attempt = None

    def _more(self, now: float) -> bool:
        if self._over:
            return False
        if self.attempt is not None:
            if self.hub.connection is not None and now - self.hub.last_arrival < STALE:
                self._cut(self.attempt.connection)  # data arrived on the old connection again
                self.attempt = None
            elif now > self.attempt.deadline:
                self._fail(self.attempt, no_answer(self._place))
        silent = self.hub.connection is None or now - self.hub.last_arrival >= STALE
        wanted = silent and self.refused is None and not self.hub.left
        if wanted and self.attempt is None and now >= self._next:
            self._connect()
        return wanted

    def _connect(self) -> None:
        try:
            sock = socket.socket(self._address[0], socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is free
            self.why = reason(error, self._place)
            self._next = time.monotonic() + LATER
            return
        attempt = self.attempt = _Try(Connection(sock, HELLO), Caller(self.token, self.run, self.rank))
        code = sock.connect_ex(self._address[1])
        if code not in (0, errno.EINPROGRESS):
            self._fail(attempt, reason(OSError(code, os.strerror(code)), self._place))
            return
        attempt.connection.send(attempt.caller.first())
        self.loop.watch(attempt.connection, lambda events: self._greet(attempt, events))

    def _fail(self, attempt: _Try, why: str) -> None:
        self._cut(attempt.connection)
        self.attempt = None
        self.why = why
        self.tried += 1
        self._next = time.monotonic() + self._pause
        self._pause = min(LATER, self._pause * 2)
        self._deliver({"kind": "_connected"})

    def _abandon(self) -> None:
        super()._abandon()
        if self.attempt is not None:
            self._cut(self.attempt.connection)
            self.attempt = None

    def _lose_unknown(self, connection: Connection, error: Exception) -> None:
        attempt = self.attempt
        if attempt is None or attempt.connection is not connection:
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
            if code:
                self._fail(attempt, reason(OSError(code, os.strerror(code)), self._place))
                return
            attempt.connected = True
        if events & selectors.EVENT_READ:
            connection.fill()
        if connection.session is None:
            line = connection.line()
            if line is not None:
                self._claim(connection, attempt.caller, line)
        if connection.session is not None:
            answer = connection.message()
            if answer is not None:
                self._join(connection, check_welcome(answer))
                return
        connection.flush()
        self.loop.watch(connection, lambda events: self._greet(attempt, events))

    def _claim(self, connection: Connection, caller: Caller, line: bytes) -> None:
        """Authenticate this agent, and send its claim."""
        connection.send(caller.take(line))
        connection.session = caller.session
        connection.limit = CLAIM
        hello = {"rank": self.rank, "instance": self._instance, "purpose": "link"}
        connection.send_frame(encode(dict(hello, of=self.hub.instance, received=self.hub.received)))

    def _join(self, connection: Connection, welcome: Dict[str, Any]) -> None:
        self.loop.forget(connection)
        self.attempt = None
        self._pause = SOON
        self._next = 0.0
        self.why = ""
        connection.limit = MESSAGE
        new = self.hub.known_as(str(welcome.get("instance"))[:CLAIM])
        self._attach(self.hub, connection, whole(welcome.get("received")) or 0)
        self._deliver({"kind": "_new_hub" if new else "_connected"})
        self._receive(self.hub, connection)


REASON = 4000  # characters of the hub's reason
ANSWER = 15.0  # seconds by which the hub may give up later than this agent

Offers = Dict[int, Dict[str, Any]]


class SpokeMeeting:
    """The side of every other agent. ``take`` is called with ``changed`` held."""

    def __init__(self, spoke: Spoke, place: str, changed: threading.Condition, numbers: Iterator[int]) -> None:
        """``numbers``: of the offers. No two of an agent are equal, so no answer to an earlier one is taken."""
        self._spoke = spoke
        self._place = place
        self._changed = changed
        self._numbers = numbers
        self._number = 0
        self._offer: Optional[Dict[str, Any]] = None  # that waits for an answer
        self._answer: Optional[Dict[str, Any]] = None

    def take(self, kind: str, message: Dict[str, Any]) -> None:
        """Handle the hub's answer, or that the hub listens again and has forgotten the offer."""
        if kind == "_new_hub" and self._offer is not None:
            self._spoke.send(self._offer)
        elif kind == "_answer" and message.get("number") == self._number:
            if "refused" not in message and not isinstance(message.get("decision"), dict):
                spoke = self._spoke
                message = {"refused": "%s (%s) sent an invalid decision" % (spoke.hub.node, spoke.role)}
            self._answer = message

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
        del decide  # the hub's
        with self._changed:
            self._number = next(self._numbers)
            self._answer = None
            self._offer = {"kind": "_offer", "number": self._number, "topic": topic, "offer": offer}
        self._spoke.send(self._offer)
        try:
            answer = self._wait(limit, alive, tolerance)
        except Exception:
            self._spoke.send({"kind": "_withdraw"})
            raise
        finally:
            self._offer = None
        if "refused" in answer:
            raise LinkError(str(answer["refused"])[:REASON])
        decision: Dict[str, Any] = answer["decision"]
        return decision

    def _wait(self, limit: float, alive: Callable[[], bool], tolerance: Optional[Tolerance]) -> Dict[str, Any]:
        spoke = self._spoke
        hub = "%s (%s)" % (spoke.hub.node, spoke.role)
        lost = HubLostError if tolerance is not None else LinkError

        def answered() -> bool:
            return self._answered(hub, lost, tolerance)

        while not answered():
            if not alive():
                raise LinkError("cancelled")
            left = limit - time.monotonic()
            if left <= 0 and spoke.hub.connection is None:
                raise lost("%s cannot reach %s: %s" % (spoke.node, hub, spoke.why))
            if left <= -ANSWER:
                raise lost("%s is connected, but sent no decision" % hub)
            with self._changed:
                self._changed.wait_for(answered, LOOK)
        assert self._answer is not None
        return self._answer

    def _answered(self, hub: str, lost: Type[LinkError], tolerance: Optional[Tolerance]) -> bool:
        if self._answer is not None:
            return True
        peer = self._spoke.hub
        if self._spoke.refused:
            raise RefusedLinkError(self._spoke.refused)
        if peer.gone or peer.left:
            raise lost("the agent of %s exited; see its agent.log" % hub)
        if tolerance is not None and peer.instance:
            silent = time.monotonic() - peer.last_arrival
            if silent > tolerance.silence():
                raise lost("no heartbeat from %s for %d s" % (hub, silent))
        return False
