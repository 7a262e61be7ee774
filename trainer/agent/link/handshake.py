"""The handshake: both ends prove that they know the run's token, and never send it.

It has three lines of ASCII in a fixed form, which are never parsed as JSON::

    caller  clusterctl-link 2 RUN RANK NONCE
    host    clusterctl-link 2 NONCE PROOF
    caller  PROOF

A nonce is 16 random bytes in hex. A proof is the HMAC-SHA-256 with the token over the side's role and the raw bytes of
the lines before it, so it covers both nonces and the caller's claim. It can be neither replayed nor reflected. When
the host's proof is wrong, the caller leaves without a proof of its own. ``RUN`` and ``RANK`` only serve messages about
rejected connections.

Each direction's key for the frames that follow (see ``frames.py``) comes from the token and all three lines. The first
frames are the caller's ``{"rank", "instance", "purpose", …}`` and the host's ``{"welcome": true, …}`` or
``{"refused": why}``. Both sides are state machines without a socket: the same code serves a selector and a blocking
thread.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Any, Dict, NamedTuple, Optional

from .frames import Seal, Session

HELLO = 512  # bytes of a line before the other end is authenticated
CLAIM = 4096  # bytes of the caller's first frame, and of the answer to it
DEADLINE = 5.0  # seconds for the whole handshake

_NAME = b"clusterctl-link 2 "
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
    """
    if "refused" in answer or not answer.get("welcome"):
        raise RefusedError(str(answer.get("refused"))[:1000])
    return answer
