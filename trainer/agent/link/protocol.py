"""The bytes on a connection: a handshake, then frames with MACs, in bounded memory both ways.

Both ends prove that they know the run's token, and never send it. The handshake has three lines of ASCII in a fixed
form, which are never parsed as JSON::

    caller  clusterctl-link 3 RUN RANK NONCE
    host    clusterctl-link 3 NONCE PROOF
    caller  PROOF

A nonce is 16 random bytes in hex. A proof is the HMAC-SHA-256 with the token over the side's role and the raw bytes of
the lines before it, so it covers both nonces and the caller's claim. It can be neither replayed nor reflected. When
the host's proof is wrong, the caller leaves without sending its proof. ``RUN`` and ``RANK`` only serve messages about
rejected connections. ``Caller`` and ``Host`` are state machines without a socket: the same code serves a selector and a
blocking thread.

Everything after the handshake is a frame::

    4 bytes   length of the payload, big endian
    16 bytes  MAC: HMAC-SHA-256, cut to 16 bytes, of the frame's number on this connection (8 bytes), the length and
              the payload
    payload   a JSON object; on a connection for files also a piece of a file

Each direction has its own key, from the token and the three lines, and counts its frames from 0. A frame that another
host changed, injected, repeated, dropped or reordered has a wrong MAC, and the connection ends. A payload is parsed
only after its MAC is verified. The first frames are the caller's ``{"rank", "instance", "purpose", …}`` and the host's
``{"welcome": true, …}``, ``{"refused": why}`` or ``{"through": [address, port]}``. An empty frame is a heartbeat. A
payload ``@CHANNEL …`` is the frame of another agent that this connection passes on, see ``relay.py``.

``Connection`` never blocks, for the agents' messages. ``Stream`` blocks, for files.

Measured in MB per second of CPU time: HMAC-SHA-256 1720 with SHA instructions and 530 without, keyed BLAKE2b 920.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import hmac
import itertools
import json
import re
import secrets
import socket
import struct
import time
from typing import Any, Callable, Deque, Dict, NamedTuple, Optional, Tuple, Union

from ..contract.untrusted import UntrustedError, parse_object
from . import CopyError

MESSAGE = 16 << 20  # bytes of a frame from an agent of the run
READ = 256 << 10  # bytes read at a time
PARTS = 64  # buffers written at a time
MAC = 16  # bytes
VALUES = 1 << 20  # of a message: each needs about 70 bytes of memory, however short its JSON is

_LENGTH = struct.Struct(">I")
_NUMBERED = struct.Struct(">QI")
HEAD = _LENGTH.size + MAC

Data = Union[bytes, bytearray, memoryview]


class EndedError(Exception):
    """The connection ended. ``by_peer``: the other side's kernel closed or reset it, so the process has exited.

    Other reasons (a timeout, no route) concern the network and say nothing about the process.
    """

    def __init__(self, text: str, by_peer: bool) -> None:
        super().__init__(text)
        self.by_peer = by_peer


class InvalidMessageError(Exception):
    """The bytes violate the protocol, or another host changed them. The text says what the other end did."""


class Seal:
    """The MACs of one direction of one connection, in order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def head(self, *payload: Data) -> bytes:
        """The header of the next frame, whose payload is given in parts."""
        return _LENGTH.pack(sum(map(len, payload))) + self._mac(*payload)

    def check(self, mac: Data, payload: Data) -> None:
        """Check the next frame.

        Raises:
            InvalidMessageError: it is not the next frame of the other end.
        """
        if not hmac.compare_digest(self._mac(payload), bytes(mac)):
            raise InvalidMessageError("sent a frame with a wrong MAC: a host between the nodes changed or repeated it")

    def _mac(self, *payload: Data) -> bytes:
        digest = self._keyed.copy()
        digest.update(_NUMBERED.pack(self._number, sum(map(len, payload))))
        for part in payload:
            digest.update(part)
        self._number += 1
        return digest.digest()[:MAC]


class Session(NamedTuple):
    """Both directions of an authenticated connection."""

    sent: Seal
    received: Seal


def encode(message: Dict[str, Any]) -> bytes:
    """Encode a message as a payload."""
    return json.dumps(message, separators=(",", ":")).encode()


def parse(payload: Data) -> Dict[str, Any]:
    """Decode a payload of an agent of the run, which may be broken or lie.

    Raises:
        InvalidMessageError: it is not a JSON object, or has too many values.
    """
    data = bytes(payload)
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        raise InvalidMessageError("sent a message that has more than %d values" % VALUES)
    try:
        return parse_object(data, limit=MESSAGE)
    except UntrustedError as error:
        raise InvalidMessageError("sent a message that %s" % error) from None


def length_of(head: Data, limit: int) -> int:
    """The length of the payload, from the header.

    Raises:
        InvalidMessageError: it is longer than ``limit``.
    """
    length: int = _LENGTH.unpack_from(head)[0]
    if length > limit:
        raise InvalidMessageError("sent a frame of %d bytes, more than the %d allowed" % (length, limit))
    return length


class Connection:
    """One TCP connection, used by one thread. ``session`` is set when the other end is authenticated."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.limit = limit  # bytes of a line or a frame
        self.session: Optional[Session] = None
        self.waiting = 0  # bytes to write
        self._out: Deque[memoryview] = collections.deque()
        self.unread = bytearray()

    @property
    def carrier(self) -> Connection:
        """The connection itself; see ``Route``."""
        return self

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self.sock.fileno()

    def beat(self) -> None:
        """Queue a heartbeat."""
        self.send_frame(b"")

    def send(self, *parts: bytes) -> None:
        """Queue bytes without copying them; ``flush`` writes them."""
        for part in parts:
            self.waiting += len(part)
            self._out.append(memoryview(part))

    def send_frame(self, *payload: bytes) -> None:
        """Queue one frame; its payload is given in parts."""
        assert self.session is not None
        self.send(self.session.sent.head(*payload), *payload)

    def flush(self) -> None:
        """Write what the kernel accepts now.

        Raises:
            EndedError: the connection ended.
        """
        try:
            while self._out:
                self._wrote(self.sock.sendmsg(itertools.islice(self._out, PARTS)))
        except BlockingIOError:
            return
        except OSError as error:
            raise _ended(error) from error

    def _wrote(self, count: int) -> None:
        self.waiting -= count
        while self._out and count >= len(self._out[0]):
            count -= len(self._out.popleft())
        if count:
            self._out[0] = self._out[0][count:]

    def fill(self) -> int:
        """Read what has arrived, at most ``READ`` bytes, so that one peer cannot starve the others.

        Raises:
            EndedError: the connection ended; ``line`` and ``message`` still return what arrived before.
        """
        try:
            data = self.sock.recv(READ)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _ended(error) from error
        if not data:
            raise EndedError("it closed the connection", by_peer=True)
        self.unread += data
        return len(data)

    def line(self) -> Optional[bytes]:
        """The next line of the handshake, with its newline; None until it is complete.

        Raises:
            InvalidMessageError: it is longer than ``limit``.
        """
        end = self.unread.find(b"\n", 0, self.limit)
        if end < 0:
            if len(self.unread) >= self.limit:
                raise InvalidMessageError("sent %r" % bytes(self.unread[:40]))
            return None
        line = bytes(self.unread[: end + 1])
        del self.unread[: end + 1]
        return line

    def message(self) -> Optional[Dict[str, Any]]:
        """The next message; None until it is complete.

        Raises:
            InvalidMessageError: the frame is too long, has a wrong MAC, or is not a message.
        """
        payload = self.payload()
        return None if payload is None else parse(payload)

    def payload(self) -> Optional[bytes]:
        """The next payload; None until it is complete."""
        assert self.session is not None
        if len(self.unread) < HEAD:
            return None
        end = HEAD + length_of(self.unread, self.limit)
        if len(self.unread) < end:
            return None
        payload = bytes(memoryview(self.unread)[HEAD:end])
        self.session.received.check(self.unread[_LENGTH.size : HEAD], payload)
        del self.unread[:end]
        return payload

    def rest(self) -> int:
        """Bytes that arrived and were not used."""
        return len(self.unread)

    def close(self) -> None:
        """Close the connection; unwritten bytes are lost."""
        self.sock.close()


class Route:
    """The hub's connection to an agent through another one, which passes its frames on; used like a ``Connection``.

    ``carrier`` is the connection to that other one, which has numbered the routes through it: ``channel``.
    """

    def __init__(self, carrier: Connection, channel: int) -> None:
        self.carrier = carrier
        self.channel = channel

    @property
    def waiting(self) -> int:
        """Bytes to write on the carrier."""
        return self.carrier.waiting

    def send_frame(self, *payload: bytes) -> None:
        """Queue one frame; its payload is given in parts."""
        self.carrier.send_frame(routed(self.channel), *payload)

    def beat(self) -> None:
        """Nothing: the agent in between sends the heartbeats of its routes, both ways."""

    def close(self) -> None:
        """Let the agent in between close the route."""
        self.carrier.send_frame(encode({"close": self.channel}))


BYE = "_bye"  # kind of a message: the agent ends on purpose
ROUTED = b"@"  # starts no JSON
_CHANNEL = re.compile(rb"@([0-9]{1,9}) ")


def routed(channel: int) -> bytes:
    """The start of a payload that is passed on."""
    return b"@%d " % channel


def split_routed(payload: bytes) -> Tuple[int, bytes]:
    """The channel, and the payload that is passed on.

    Raises:
        InvalidMessageError: there is none.
    """
    found = _CHANNEL.match(payload)
    if found is None:
        raise InvalidMessageError("sent a frame without a channel")
    return int(found.group(1)), payload[found.end() :]


def _ended(error: OSError) -> EndedError:
    return EndedError(error.strerror or str(error), by_peer=isinstance(error, (ConnectionResetError, BrokenPipeError)))


LINE = 64 << 10  # bytes of a message
PIECE = 1 << 20  # bytes of a file in one frame
SILENCE = 60.0  # seconds without a byte after which a copy has failed
CANCEL_CHECK = 0.5  # seconds between checks for a cancellation


class Stream:
    """Messages and pieces of files over one blocking socket. It calls ``alive`` while it waits.

    Every frame has a MAC: ``receive`` and ``read`` return only what the other end sent, in its order.

    Every method raises CopyError when the other side exited, is silent or violates the protocol, or ``alive`` is false.
    """

    def __init__(self, sock: socket.socket, session: Session, alive: Callable[[], bool] = lambda: True) -> None:
        sock.settimeout(CANCEL_CHECK)
        self.sock = sock
        self.alive = alive
        self._session = session

    def send(self, message: Dict[str, Any]) -> None:
        """Send one message."""
        payload = encode(message)
        self._send(self._session.sent.head(payload) + payload)

    def write(self, piece: memoryview) -> None:
        """Send a frame with a piece of a file, at most ``PIECE`` bytes."""
        head = self._session.sent.head(piece)
        if len(piece) <= LINE:
            self._send(head + piece)
        else:
            self._send(head)
            self._send(piece)

    def receive(self) -> Optional[Dict[str, Any]]:
        """Receive the next message; None at the end."""
        buffer = memoryview(bytearray(LINE))
        count = self.read(buffer)
        if count is None:
            return None
        try:
            return parse(buffer[:count])
        except InvalidMessageError as error:
            raise CopyError("the other side %s" % error) from None

    def read(self, view: memoryview) -> Optional[int]:
        """Read the next frame's payload into the start of ``view``. Returns its length; None at the end."""
        head = memoryview(bytearray(HEAD))
        count = self._fill(head)
        if not count:
            return None
        try:
            length = length_of(head, len(view))
            if count < HEAD or self._fill(view[:length]) < length:
                raise CopyError("the other side closed the connection in the middle of a frame")
            self._session.received.check(head[HEAD - MAC :], view[:length])
        except InvalidMessageError as error:
            raise CopyError("the other side %s" % error) from None
        return length

    def _send(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            view = view[self._patiently(functools.partial(self.sock.send, view)) :]

    def _fill(self, view: memoryview) -> int:
        """Read until ``view`` is full. Returns the number of bytes; fewer only at the end."""
        size = len(view)
        while view:
            count = self._patiently(functools.partial(self.sock.recv_into, view))
            if not count:
                break
            view = view[count:]
        return size - len(view)

    def _patiently(self, work: Callable[[], int]) -> int:
        """Call ``work`` until the socket is ready for it."""
        limit = time.monotonic() + SILENCE
        while time.monotonic() < limit:
            if not self.alive():
                raise CopyError("cancelled")
            count = _once(work)
            if count is not None:
                return count
        raise CopyError("no data moved for %d s" % SILENCE)


def _once(work: Callable[[], int]) -> Optional[int]:
    try:
        return work()
    except socket.timeout:
        return None
    except OSError as error:
        raise CopyError("the connection broke: %s" % error) from error


HELLO = 512  # bytes of a line before the other end is authenticated
CLAIM = 4096  # bytes of the caller's first frame, and of the answer to it
DEADLINE = 5.0  # seconds for the whole handshake

_NAME = b"clusterctl-link 3 "
_FIRST = re.compile(_NAME + rb"([!-~]{1,200}) ([0-9]{1,6}) [0-9a-f]{32}\n")
_SECOND = re.compile(_NAME + rb"[0-9a-f]{32} ([0-9a-f]{64})\n")
_THIRD = re.compile(rb"([0-9a-f]{64})\n")


class UnknownPeerError(Exception):
    """The other end does not belong to this run. The text says what it sent."""


class RefusedError(Exception):
    """The other end belongs to the run and refuses. The text says why."""


class Claim(NamedTuple):
    """What a caller claims before it is authenticated."""

    run: str
    rank: int


def _digest(token: str, role: bytes, lines: bytes) -> bytes:
    return hmac.new(token.encode(), role + b"\n" + lines, hashlib.sha256).digest()


def _proof(token: str, role: bytes, lines: bytes) -> bytes:
    return _digest(token, role, lines).hex().encode()


def _key(token: str, direction: bytes, lines: bytes) -> bytes:
    return _digest(token, b"key of " + direction, lines)


class Caller:
    """The side that connects. ``session`` is set when the host is authenticated."""

    def __init__(self, token: str, run: str, rank: int) -> None:
        self._token = token
        shown = re.sub("[^!-~]", "?", run)[:200] or "?"
        self._first = b"%s%s %d %s\n" % (_NAME, shown.encode(), rank, secrets.token_hex(16).encode())
        self.session: Optional[Session] = None

    def first(self) -> bytes:
        """The first line."""
        return self._first

    def take(self, line: bytes) -> bytes:
        """Return the answer to the host's line: the last line of the handshake.

        Raises:
            UnknownPeerError: the host does not know the token.
        """
        found = _SECOND.fullmatch(line)
        if found is None:
            raise UnknownPeerError("sent %r" % line[:40].rstrip(b"\n"))
        nonce_line = line[: found.start(1)]
        if not hmac.compare_digest(found.group(1), _proof(self._token, b"host", self._first + nonce_line)):
            raise UnknownPeerError("does not know this run's token; is it the agent of another run?")
        transcript = self._first + line
        last = _proof(self._token, b"caller", transcript) + b"\n"
        there, here = (_key(self._token, way, transcript + last) for way in (b"caller", b"host"))
        self.session = Session(Seal(there), Seal(here))
        return last


class Host:
    """The side that listens. ``session`` is set when the caller is authenticated."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._transcript = b""
        self.claim: Optional[Claim] = None
        self.session: Optional[Session] = None

    def take(self, line: bytes) -> bytes:
        """Return the answer to a line of the caller; empty after its last one.

        Raises:
            UnknownPeerError: it is not an agent of this run.
        """
        if self.claim is None:
            found = _FIRST.fullmatch(line)
            if found is None:
                raise UnknownPeerError("sent %r" % line[:40].rstrip(b"\n"))
            self.claim = Claim(found.group(1).decode(), int(found.group(2)))
            second = b"%s%s " % (_NAME, secrets.token_hex(16).encode())
            second += _proof(self._token, b"host", line + second) + b"\n"
            self._transcript = line + second
            return second
        found = _THIRD.fullmatch(line)
        if found is None or not hmac.compare_digest(found.group(1), _proof(self._token, b"caller", self._transcript)):
            raise UnknownPeerError("claimed to be rank %d, but does not know this run's token" % self.claim.rank)
        here, there = (_key(self._token, way, self._transcript + line) for way in (b"host", b"caller"))
        self.session = Session(Seal(here), Seal(there))
        return b""


def check_welcome(answer: Dict[str, Any]) -> Dict[str, Any]:
    """Return the host's answer.

    Raises:
        RefusedError: the host refuses.
        InvalidMessageError: it is no answer.
    """
    if "refused" in answer:
        raise RefusedError(str(answer["refused"])[:1000])
    if not answer.get("welcome"):
        raise InvalidMessageError("sent no welcome")
    return answer


def read_line(sock: socket.socket) -> bytes:
    """Read one line of the handshake, byte by byte: what follows belongs to the frames."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > HELLO:
            raise InvalidMessageError("it closed the connection")
        line += byte
    return line
