"""What both ends of the link do: speak with peers over connections that come and go."""

from __future__ import annotations

import contextlib
import selectors
import sys
import threading
import time
from typing import Any, Callable, Dict, List

from contract.plan import Link, Plan
from link.frames import Connection, EndedError, NotOursError, encode
from link.loop import Loop
from link.peer import BEAT, Peer
from link.proof import RefusedError, StrangerError

PATIENCE = 3.0  # seconds of silence that are never too many: one heartbeat may be late
LOGGED = 20  # failures of connections that are logged; a peer must not fill the disk


class End:
    """One agent's end. ``deliver(message)`` gets what has come for this agent, in the link's thread."""

    def __init__(self, plan: Plan, link: Link, peers: List[Peer], deliver: Callable[[Dict[str, Any]], None]) -> None:
        self.run = plan.run
        self.node = plan.node
        self.rank = plan.node_rank
        self.token = link.token
        self.lost_after = max(PATIENCE, link.lost_after)
        self.peers = {peer.rank: peer for peer in peers}
        self.loop = Loop(self._tick, self._lose, self._broken)
        self._deliver = deliver
        self._beaten = 0.0
        self._closing = False
        self._over = False  # the goodbye was said: no new connection
        self._logged = 0
        self._said = threading.Event()

    def start(self) -> None:
        """Begin."""
        self.loop.start()

    def tell(self, message: Dict[str, Any]) -> None:
        """Tell all others. Rank 0 is told by everybody and relays."""
        self.loop.post(lambda: self._tell_all(message))

    def tell_one(self, rank: int, message: Dict[str, Any]) -> None:
        """Tell the agent of one rank, to which this end must have a connection."""
        self.loop.post(lambda: self._tell(self.peers[rank], encode(message)))

    def close(self, patience: float) -> None:
        """Say what is still to be said (for at most ``patience`` seconds), say goodbye, and end."""
        self.loop.post(self._close)
        self._said.wait(patience)
        self.loop.post(self._goodbye)
        self.loop.stop(patience)

    def _close(self) -> None:
        self._closing = True
        self._look_whether_said()

    def _look_whether_said(self) -> None:
        if all(peer.said_all() or peer.left for peer in self.peers.values()):
            self._said.set()

    def _goodbye(self) -> None:
        self._over = True
        for peer in self.peers.values():
            connection = peer.connection
            if connection is not None:
                with contextlib.suppress(EndedError):
                    connection.say(encode({"bye": True}))
                    connection.flush()
                peer.detach(by_peer=False, now=time.monotonic())
                self._cut(connection)

    def _broken(self, error: BaseException) -> None:
        self._said.set()
        self._deliver({"kind": "broken", "text": "%s: %s" % (type(error).__name__, error)})

    def _lose(self, connection: Connection, error: Exception) -> None:
        """Turns any failure of one connection into the loss of that connection only, and logs it.

        The handlers of connections raise, and the loop calls this. An exception that is not one of the link's own is a
        mistake in this program, which only what came over this connection has shown.
        """
        peer = next((peer for peer in self.peers.values() if peer.connection is connection), None)
        if not isinstance(error, (EndedError, NotOursError, StrangerError, RefusedError)):
            import traceback  # noqa: PLC0415 - imported only after a crash

            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            self._log("the connection of %s failed:\n%s" % (peer.node if peer else "a guest", text))
        elif peer is not None and isinstance(error, NotOursError):
            self._log("%s %s; its connection was closed\n" % (peer.node, error))
        by_peer = isinstance(error, EndedError) and error.by_peer
        if peer is None:
            self._lose_stranger(connection, error)
        elif by_peer:
            with contextlib.suppress(EndedError, NotOursError):
                while connection.fill():  # what it said last
                    self._hear(peer, connection)
        if peer is not None and peer.connection is connection:
            peer.detach(by_peer, time.monotonic())
        self._cut(connection)

    def _lose_stranger(self, connection: Connection, error: Exception) -> None:
        """A connection is lost that belongs to no peer yet."""
        raise NotImplementedError

    def _log(self, text: str) -> None:
        """Write to the agent's own log."""
        self._logged += 1
        if self._logged <= LOGGED:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("agent: the link: " + text)
                sys.stderr.flush()

    def _cut(self, connection: Connection) -> None:
        self.loop.forget(connection)
        connection.close()

    def _tell(self, peer: Peer, body: bytes) -> None:
        peer.tell(body)
        self._pump(peer)

    def _tell_all(self, message: Dict[str, Any]) -> None:
        body = encode(message)
        for peer in self.peers.values():
            self._tell(peer, body)

    def _attach(self, peer: Peer, connection: Connection, received: int) -> None:
        before = peer.attach(connection, received, time.monotonic())
        if before is not None:
            self._cut(before)
        self._pump(peer)

    def _pump(self, peer: Peer, beat: bool = False) -> None:
        connection = peer.connection
        if connection is None:
            return
        try:
            peer.pump(beat)
            connection.flush()
            self.loop.watch(connection, lambda events: self._ready(peer, connection, events))
        except Exception as error:  # noqa: BLE001 - see _lose
            self._lose(connection, error)

    def _ready(self, peer: Peer, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                connection.fill()
            except EndedError:
                self._hear(peer, connection)  # what it said last
                raise
            self._hear(peer, connection)
        self._pump(peer)

    def _hear(self, peer: Peer, connection: Connection) -> None:
        """Take all messages that have come whole."""
        while peer.connection is connection:  # a message may have led to its end
            line = connection.message()
            if line is None:
                return
            peer.heard = time.monotonic()
            message = peer.take(line)
            if message is not None:
                self._come(peer, message)

    def _come(self, peer: Peer, message: Dict[str, Any]) -> None:
        """A message has come."""
        raise NotImplementedError

    def _news(self, peer: Peer, message: Dict[str, Any]) -> None:
        """A peer was lost, is back or is gone."""
        raise NotImplementedError

    def _more(self, now: float) -> bool:
        """What else is done at a tick. True: do it again soon."""
        raise NotImplementedError

    def _tick(self, now: float, late: float) -> bool:
        beat = now - self._beaten >= BEAT
        if beat:
            self._beaten = now
        hurried = self._closing
        for peer in self.peers.values():
            peer.heard += late
            self._pump(peer, beat)
            news = peer.judge(now, self.lost_after)
            if news is not None:
                message = {"kind": news, "node": peer.node, "rank": peer.rank}
                if news == "lost":
                    message["silent"] = round(now - peer.heard, 1)
                self._news(peer, message)
            hurried = hurried or (peer.closed is not None and not peer.gone and not peer.left)
        if self._closing:
            self._look_whether_said()
        return self._more(now) or hurried
