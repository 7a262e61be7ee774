"""What one agent knows of another, whatever connection there is between them at the moment.

Messages are numbered. They are kept until the other side has acknowledged them and sent again over the next
connection; what comes twice is known by its number. So a connection may break at any byte, and nothing is lost
and nothing doubled. In the frames::

    {"n": 7, "m": {…}}     message 7
    {"ack": 7}             everything up to 7 has come; also the heartbeat, once a second
    {"bye": true}          this agent ends on purpose
"""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, Optional, Tuple

from link.frames import MESSAGE, READ, Connection, encode

BEAT = 1.0  # seconds between heartbeats
RETURN = 3.0  # seconds in which a peer whose kernel closed the connection may come back
WAITING = 32 << 20  # bytes kept for a peer that does not acknowledge
WRAPPED = 64  # bytes that a message's number takes
_NUMBERS = 1 << 62  # also a time in nanoseconds is below this


def whole(value: Any) -> Optional[int]:
    """A number of at least 0 that another agent sent; None where it is none."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _NUMBERS:
        return value
    return None


class Peer:
    """The other agent: what is on the way to it, and when it was last heard. Used by the link's thread only."""

    def __init__(self, rank: int, node: str) -> None:
        self.rank = rank
        self.node = node
        self.connection: Optional[Connection] = None
        self.instance = ""  # of the process there; empty: it has never come
        self.address = ""
        self.received = 0  # the highest number that has come from it
        self.heard = 0.0  # when anything came last
        self.closed: Optional[float] = None  # when its kernel closed the connection
        self.lost = False
        self.gone = False
        self.left = False  # it said that it ends
        self._kept: Deque[Tuple[int, bytes]] = collections.deque()
        self._size = 0
        self._number = 0  # of the last message for it
        self._written = 0  # of the last one that went into the present connection
        self._told = 0  # the last acknowledgement that was sent

    def tell(self, body: bytes) -> bool:
        """Queue a message, encoded. False: too much waits already, and it was dropped (what came first matters most).

        Peers share the bytes of a message that all of them get.
        """
        if self.left or len(body) > MESSAGE - WRAPPED or self._size + len(body) > WAITING:
            return False
        self._number += 1
        self._kept.append((self._number, body))
        self._size += len(body)
        return True

    def known_as(self, instance: str) -> bool:
        """The process there says which it is. True when it is a successor: its numbers begin anew."""
        before, self.instance = self.instance, instance
        if before in ("", instance):
            return False
        self.received = 0
        self.left = self.gone = self.lost = False
        kept = [body for _, body in self._kept]
        self._kept.clear()
        self._number = self._size = 0
        for body in kept:
            self.tell(body)
        return True

    def attach(self, connection: Connection, received: int, now: float) -> Optional[Connection]:
        """Go on over a new connection, to a peer that has ``received`` so much. The connection before, to be closed."""
        before, self.connection = self.connection, connection
        received = min(received, self._number)
        self._acknowledged(received)
        self._written = received
        self.heard = now
        self.closed = None
        return before

    def detach(self, by_peer: bool, now: float) -> None:
        """The connection has ended."""
        self.connection = None
        if by_peer:
            self.closed = now

    def take(self, line: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """The message of a line, unless it has come before or the line is none."""
        if "bye" in line:
            self.left = True
        self._acknowledged(whole(line.get("ack")) or 0)
        number, message = whole(line.get("n")), line.get("m")
        if not isinstance(message, dict) or number != self.received + 1:
            return None
        self.received = number
        return message

    def pump(self, beat: bool = False) -> None:
        """Move what is to be said into the connection, never more than it can soon write."""
        connection = self.connection
        if connection is None:
            return
        for number, body in self._kept:
            if connection.waiting >= READ:
                return
            if number > self._written:
                connection.say(b'{"n":%d,"m":' % number, body, b"}")
                self._written = number
        if self._told != self.received or (beat and not connection.waiting):
            connection.say(encode({"ack": self.received}))
            self._told = self.received

    def said_all(self) -> bool:
        """Whether everything has been acknowledged."""
        return not self._kept

    def judge(self, now: float, lost_after: float) -> Optional[str]:
        """``lost``, ``gone`` or ``back`` when that has just become true."""
        if self.left or not self.instance:
            return None
        silent = now - self.heard
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
        while self._kept and self._kept[0][0] <= number:
            self._size -= len(self._kept.popleft()[1])
