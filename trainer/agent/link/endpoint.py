"""One end of the link: its thread, its peers, and connections that break and are made again.

Messages are numbered. A peer keeps them until the other side has acknowledged them, and sends them again over the next
connection. The receiver drops duplicates by their number. So a connection may break at any byte, and no message is
lost or delivered twice. In the frames::

    {"n": 7, "m": {…}}     message 7
    {"ack": 7}             everything up to 7 has arrived
    {"bye": true}          this agent ends on purpose

An empty frame is the heartbeat, once a second. ``relay.py`` has the frames of agents that pass on those of others.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import selectors
import socket
import sys
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple, Union

from ..contract.plan import Link, Plan
from ..contract.untrusted import whole
from .protocol import (
    MESSAGE,
    READ,
    ROUTED,
    Connection,
    EndedError,
    InvalidMessageError,
    RefusedError,
    Route,
    UnknownPeerError,
    encode,
    parse,
)

TICK = 0.25  # seconds between looks at the clock
HURRY = 0.05  # the same, while a connection is missing
LOOK = 0.2  # seconds between checks for the cancellation of a meeting


class Loop:
    """Calls handlers of connections, posted work and ``tick`` from one thread, so that they need no locks.

    ``tick(now, late)`` returns true to be called again soon. ``late``: the seconds for which this thread was delayed
    (the process was stopped, the machine slept). The silence of others in that time means nothing.

    ``lose(connection, error)`` gets the exceptions of connections' handlers. An exception of ``tick`` or of posted
    work ends the loop, and ``broken`` is called.
    """

    def __init__(
        self,
        tick: Callable[[float, float], bool],
        lose: Callable[[Connection, Exception], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self._tick = tick
        self._lose = lose
        self._broken = broken
        self._posted: Deque[Callable[[], None]] = collections.deque()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._running = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._running = True
        self.selector.register(self._wake, selectors.EVENT_READ, self._drain)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Let the thread do ``work``, soon and in order."""
        self._posted.append(work)
        with contextlib.suppress(OSError):  # it is full, so the thread is about to look; or the loop has ended
            self._waker.send(b"\0")

    def stop(self, patience: float) -> None:
        """End the thread after the posted work."""
        self.post(self._end)
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(patience)

    def watch(self, connection: Connection, handler: Callable[[int], None], reading: bool = True) -> None:
        """Call ``handler(events)`` when the connection is readable (``reading``) or has bytes to write and is writable.

        The first handler stays until ``forget``.
        """
        events = (selectors.EVENT_READ if reading else 0) | (selectors.EVENT_WRITE if connection.waiting else 0)
        key = self.selector.get_map().get(connection.fileno())
        if not events:
            self.forget(connection)
        elif key is None:
            self.selector.register(connection, events, handler)
        elif key.events != events:
            self.selector.modify(connection, events, key.data)

    def forget(self, connection: Any) -> None:
        """Stop watching the connection."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection)

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _end(self) -> None:
        self._running = False

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            key.data(events)
        except Exception as error:
            if not isinstance(key.fileobj, Connection):
                raise
            self._lose(key.fileobj, error)

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while self._running:
                for key, events in self.selector.select(max(0.0, due - time.monotonic())):
                    # An earlier handler of this round may have closed it.
                    if self.selector.get_map().get(key.fd) is key:
                        self._handle(key, events)
                while self._posted:
                    self._posted.popleft()()
                now = time.monotonic()
                if now >= due:
                    due = now + (HURRY if self._tick(now, max(0.0, now - due - 1.0)) else TICK)
        except Exception as error:  # noqa: BLE001 - any failure of the link must be reported
            self._broken(error)
        finally:
            self._close()

    def _close(self) -> None:
        for sock in (self._wake, self._waker):
            sock.close()
        self.selector.close()


BEAT = 1.0  # seconds between heartbeats
RETURN = 3.0  # seconds in which a peer whose kernel closed the connection may reconnect
WAITING = 32 << 20  # bytes kept for a peer that does not acknowledge
WRAPPED = 64  # bytes of a message's number


class Peer:
    """Another agent: the messages for it, and when its last message arrived. Used by the link's thread only.

    ``rank`` is its position in ``Link.nodes``: its rank in the first attempt.
    """

    def __init__(self, rank: int, node: str) -> None:
        self.rank = rank
        self.node = node
        self.connection: Optional[Union[Connection, Route]] = None
        self.relays: Optional[int] = None  # the port at which it would pass on the frames of others
        self.instance = ""  # the id of its process; empty: it has never connected
        self.address = ""
        self.received = 0  # the highest number that it sent
        self.last_arrival = 0.0  # when anything last arrived
        self.closed: Optional[float] = None  # when its kernel closed the connection
        self.lost = False
        self.gone = False
        self.left = False  # it has sent its goodbye
        self.unacknowledged: Deque[Tuple[int, bytes]] = collections.deque()
        self.size = 0
        self._number = 0  # of the last message for it
        self._written = 0  # of the last message written to the current connection
        self._last_ack = 0  # the last acknowledgement that was sent

    def queue(self, body: bytes) -> bool:
        """Queue an encoded message. False: it was dropped, because too much is waiting (earlier messages matter more).

        Peers share the bytes of a message for all of them.
        """
        if self.left or len(body) > MESSAGE - WRAPPED or self.size + len(body) > WAITING:
            return False
        self._number += 1
        self.unacknowledged.append((self._number, body))
        self.size += len(body)
        return True

    def known_as(self, instance: str) -> bool:
        """Record the id of the peer's process. True for a new process, whose numbers start again."""
        before, self.instance = self.instance, instance
        if before in ("", instance):
            return False
        self.left = self.gone = self.lost = False
        self.restart()
        return True

    def restart(self) -> None:
        """Number the messages from 1 again, both ways: the peer has forgotten the earlier numbers."""
        self.received = 0
        kept = [body for _, body in self.unacknowledged]
        self.unacknowledged.clear()
        self._number = self.size = 0
        for body in kept:
            self.queue(body)

    def attach(
        self, connection: Union[Connection, Route], received: int, now: float
    ) -> Optional[Union[Connection, Route]]:
        """Continue over a new connection, after message ``received``. Returns the old connection, for closing."""
        before, self.connection = self.connection, connection
        received = min(received, self._number)
        self._acknowledged(received)
        self._written = received
        self.last_arrival = now
        self.closed = None
        return before

    def detach(self, by_peer: bool, now: float) -> None:
        """Record that the connection ended."""
        self.connection = None
        if by_peer:
            self.closed = now

    def take(self, line: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """The message in a line, unless it is a duplicate or invalid."""
        if "bye" in line:
            self.left = True
        self._acknowledged(whole(line.get("ack")) or 0)
        number, message = whole(line.get("n")), line.get("m")
        if not isinstance(message, dict) or number != self.received + 1:
            return None
        self.received = number
        return message

    def pump(self, beat: bool = False) -> None:
        """Move messages to the connection, never more than it can write soon."""
        connection = self.connection
        if connection is None:
            return
        for number, body in self.unacknowledged:
            if connection.waiting >= READ:
                return
            if number > self._written:
                connection.send_frame(b'{"n":%d,"m":' % number, body, b"}")
                self._written = number
        if self._last_ack != self.received:
            connection.send_frame(encode({"ack": self.received}))
            self._last_ack = self.received
        elif beat and not connection.waiting:
            connection.beat()

    def exclude(self) -> None:
        """Forget what waits for the peer: it no longer belongs to the run."""
        self.left = True
        self.unacknowledged.clear()
        self.size = 0

    def all_acknowledged(self) -> bool:
        """Whether all messages are acknowledged."""
        return not self.unacknowledged

    def judge(self, now: float, lost_after: float) -> Optional[str]:
        """Return ``lost``, ``gone`` or ``back`` when that has just become true."""
        if self.left or not self.instance:
            return None
        silent = now - self.last_arrival
        if self.closed is not None and now - self.closed >= RETURN:
            if not self.gone:
                self.gone = True
                return "gone"
        elif silent > lost_after:
            if not self.lost:
                self.lost = True
                return "lost"
        elif self.connection is not None and (self.lost or self.gone):
            self.lost = self.gone = False
            return "back"
        return None

    def _acknowledged(self, number: int) -> None:
        while self.unacknowledged and self.unacknowledged[0][0] <= number:
            self.size -= len(self.unacknowledged.popleft()[1])


PATIENCE = 3.0  # seconds of silence that are always allowed: one heartbeat may be late
PASSED_ON = 3 * BEAT  # more of them where agents pass on the heartbeats of others, and may have to be replaced
LOGGED = 20  # number of logged failures of connections: a peer must not fill the disk


class End:
    """One agent's end. ``deliver(message)`` gets the messages for this agent, in the link's thread."""

    def __init__(self, plan: Plan, link: Link, peers: List[Peer], deliver: Callable[[Dict[str, Any]], None]) -> None:
        self.run = plan.run
        self.node = plan.node
        self.rank = plan.node_rank
        self.token = link.token
        self.many = len(link.nodes) - 1 > link.width  # some agents are connected through others, see relay.py
        self.lost_after = max(PATIENCE + (PASSED_ON if self.many else 0.0), link.lost_after)
        self.peers = {peer.rank: peer for peer in peers}
        self.loop = Loop(self.tick, self._lose, self._broken)
        self._deliver = deliver
        self._beaten = 0.0
        self._closing = False
        self._over = False  # goodbye was sent: no new connection
        self._logged = 0
        self._flushed = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        self.loop.start()

    def send(self, message: Dict[str, Any]) -> None:
        """Send a message to all others, or to the position ``to`` in it. The hub gets all messages and relays them."""
        self.loop.post(lambda: self._send_all(message))

    def send_to(self, rank: int, message: Dict[str, Any]) -> None:
        """Send a message to one rank, which must be a peer of this end."""
        self.loop.post(lambda: self._send(self.peers[rank], encode(message)))

    def close(self, patience: float) -> None:
        """Flush the messages (for at most ``patience`` seconds), say goodbye, and end."""
        self.loop.post(self._close)
        self._flushed.wait(patience)
        self.loop.post(self.say_goodbye)
        self.loop.stop(patience)

    def abandon(self, patience: float) -> None:
        """End at once, without a goodbye: the others learn that this agent no longer uses this end."""
        self.loop.post(self._abandon)
        self.loop.stop(patience)

    def _abandon(self) -> None:
        self._over = True
        for peer in self.peers.values():
            connection = peer.connection
            if connection is not None:
                peer.detach(by_peer=False, now=time.monotonic())
                self._cut(connection)

    def _close(self) -> None:
        self._closing = True
        self._check_acknowledged()

    def _check_acknowledged(self) -> None:
        if all(peer.all_acknowledged() or peer.left for peer in self.peers.values()):
            self._flushed.set()

    def say_goodbye(self) -> None:
        """End all connections on purpose, in the link's thread. No new one is made."""
        self._over = True
        for peer in sorted(self.peers.values(), key=lambda peer: isinstance(peer.connection, Connection)):
            connection = peer.connection  # those through others first: they need the connections of these
            if connection is not None:
                with contextlib.suppress(EndedError):
                    connection.send_frame(encode({"bye": True}))
                    connection.carrier.flush()
                peer.detach(by_peer=False, now=time.monotonic())
                self._cut(connection)

    def _broken(self, error: BaseException) -> None:
        self._flushed.set()
        self._deliver({"kind": "broken", "text": "%s: %s" % (type(error).__name__, error)})

    def _lose(self, connection: Union[Connection, Route], error: Exception) -> None:
        """End one connection after a failure, and log the failure. Other connections continue.

        The loop calls this with the exception of a connection's handler. An exception that is not the link's own is a
        bug in this program that the data of this connection triggered.
        """
        peer = next((peer for peer in self.peers.values() if peer.connection is connection), None)
        if not isinstance(error, (EndedError, InvalidMessageError, UnknownPeerError, RefusedError)):
            import traceback  # noqa: PLC0415 - imported only after a crash

            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._log("the connection of %s failed:\n%s" % (peer.node if peer else "an unknown agent", text))
        elif peer is not None and isinstance(error, InvalidMessageError):
            self._log("%s %s; its connection was closed\n" % (peer.node, error))
        by_peer = isinstance(error, EndedError) and error.by_peer
        if peer is None:
            self._lose_unknown(connection, error)
        elif by_peer and isinstance(connection, Connection):
            with contextlib.suppress(EndedError, InvalidMessageError):
                while connection.fill():  # its last messages
                    self._receive(peer, connection)
        if peer is not None and peer.connection is connection:
            self._detach(peer, by_peer)
        self._cut(connection)

    def _detach(self, peer: Peer, by_peer: bool) -> None:
        """Record that the connection of a peer ended; ``by_peer``: its kernel closed it."""
        peer.detach(by_peer, time.monotonic())

    def _lose_unknown(self, connection: Union[Connection, Route], error: Exception) -> None:
        """Handle the loss of a connection that belongs to no peer yet."""
        raise NotImplementedError

    def _log(self, text: str) -> None:
        """Write to the agent's own log."""
        self._logged += 1
        if self._logged <= LOGGED:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("agent: the link: " + text)
                sys.stderr.flush()

    def _cut(self, connection: Union[Connection, Route]) -> None:
        if isinstance(connection, Connection):
            self.loop.forget(connection)
        connection.close()

    def _send(self, peer: Peer, body: bytes) -> None:
        peer.queue(body)
        self._pump(peer)

    def _send_all(self, message: Dict[str, Any]) -> None:
        body = encode(message)
        for peer in self.peers.values():
            self._send(peer, body)

    def _attach(self, peer: Peer, connection: Union[Connection, Route], received: int) -> None:
        before = peer.attach(connection, received, time.monotonic())
        if before is not None:
            self._cut(before)
        self._pump(peer)

    def _pump(self, peer: Peer, beat: bool = False) -> None:
        if peer.connection is None:
            return
        carrier = peer.connection.carrier
        try:
            peer.pump(beat)
            carrier.flush()
            self.loop.watch(carrier, lambda events: self._ready(peer, carrier, events))
        except Exception as error:  # noqa: BLE001 - see _lose
            # Later: this may be called in the middle of a message of that connection, and the next ones must wait.
            self.loop.post(functools.partial(self._lose, carrier, error))

    def _ready(self, peer: Peer, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                connection.fill()
            except EndedError:
                self._receive(peer, connection)  # its last messages
                raise
            self._receive(peer, connection)
        self._pump(peer)

    def _receive(self, peer: Peer, connection: Connection) -> None:
        """Handle all complete frames."""
        while peer.connection is connection:  # a message may have ended it
            payload = connection.payload()
            if payload is None:
                return
            peer.last_arrival = time.monotonic()
            if payload.startswith(ROUTED):
                self._take_routed(peer, connection, payload)
            elif payload:
                self._take(peer, parse(payload))

    def _take(self, peer: Peer, line: Dict[str, Any]) -> None:
        """Handle a line of a peer."""
        message = peer.take(line)
        if message is not None:
            self._handle(peer, message)

    def _take_routed(self, peer: Peer, carrier: Connection, payload: bytes) -> None:
        """Handle a payload that ``peer`` passes on, or is to pass on."""
        raise NotImplementedError

    def _handle(self, peer: Peer, message: Dict[str, Any]) -> None:
        """Handle a message of a peer."""
        raise NotImplementedError

    def _news(self, peer: Peer, message: Dict[str, Any]) -> None:
        """Handle that a peer is lost, back or gone."""
        raise NotImplementedError

    def _more(self, now: float) -> bool:
        """Do the periodic work. True: call again soon."""
        raise NotImplementedError

    def tick(self, now: float, late: float) -> bool:
        """Send what is waiting, judge the silence of peers, and do the periodic work; see ``Loop``."""
        beat = now - self._beaten >= BEAT
        if beat:
            self._beaten = now
        hurried = self._closing
        for peer in self.peers.values():
            peer.last_arrival += late
            self._pump(peer, beat)
            news = peer.judge(now, self.lost_after)
            if news is not None:
                message = {"kind": news, "node": peer.node, "rank": peer.rank}
                if news == "lost":
                    message["silent"] = round(now - peer.last_arrival, 1)
                self._news(peer, message)
            hurried = hurried or (peer.closed is not None and not peer.gone and not peer.left)
        if self._closing:
            self._check_acknowledged()
        return self._more(now) or hurried
