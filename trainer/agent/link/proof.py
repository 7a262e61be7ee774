"""Who is at the other end: both sides prove that they know the run's token, and the token never travels.

::

    caller  {"link": 1, "run": …, "rank": 1, "instance": …, "purpose": "link", "nonce": A, …}
    host    {"nonce": B, "proof": HMAC("host", the caller's line, B)}
    caller  {"proof": HMAC("caller", the caller's line, B)}
    host    {"welcome": true, …} or {"refused": why}

The proofs cover all that the caller says of itself and both nonces, so none can be used again or turned round. The
caller leaves before it has proved anything when the host's proof is wrong. Both sides are state machines without
a socket: the same code serves a selector and a blocking thread.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from typing import Any, Dict, Optional

from link.frames import frame

VERSION = 1
HELLO = 4096  # bytes that a line may have before anything is proved
DEADLINE = 5.0  # seconds for all of it


class StrangerError(Exception):
    """The other end does not belong to this run. The text says what it did."""


class RefusedError(Exception):
    """The other end belongs to the run and says no. The text says why."""


def _proof(token: str, role: str, hello: Dict[str, Any], nonce: str) -> str:
    said = json.dumps([role, hello, nonce], sort_keys=True).encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def _text(message: Dict[str, Any], key: str) -> str:
    value = message.get(key)
    return value if isinstance(value, str) and value.isascii() else ""


class Caller:
    """The side that connects. ``welcome`` is the host's last line, once it has come."""

    def __init__(self, token: str, hello: Dict[str, Any]) -> None:
        self._token = token
        self._hello = dict(hello, link=VERSION, nonce=secrets.token_hex(16))
        self._proved = False
        self.welcome: Optional[Dict[str, Any]] = None

    def first(self) -> bytes:
        """What is said first."""
        return frame(self._hello)

    def take(self, message: Dict[str, Any]) -> bytes:
        """The answer to a line of the host; empty when there is nothing to say.

        Raises:
            StrangerError: the host does not know the token.
            RefusedError: it does, and says no.
        """
        if not self._proved:
            nonce = _text(message, "nonce")
            if not hmac.compare_digest(_text(message, "proof"), _proof(self._token, "host", self._hello, nonce)):
                raise StrangerError("does not know this run's token; is it the agent of another run?")
            self._proved = True
            return frame({"proof": _proof(self._token, "caller", self._hello, nonce)})
        if "refused" in message:
            raise RefusedError(str(message["refused"]))
        self.welcome = message
        return b""


class Host:
    """The side that listens. ``hello`` is what the caller said of itself, once that is proved."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_hex(16)
        self.claimed: Optional[Dict[str, Any]] = None
        self.hello: Optional[Dict[str, Any]] = None

    def take(self, message: Dict[str, Any]) -> bytes:
        """The answer to a line of the caller; empty once it has proved what it said.

        Raises:
            StrangerError: it is no agent of this run.
        """
        if self.claimed is None:
            if message.get("link") != VERSION or not isinstance(message.get("rank"), int):
                raise StrangerError("is no agent")
            self.claimed = message
            return frame({"nonce": self._nonce, "proof": _proof(self._token, "host", message, self._nonce)})
        if not hmac.compare_digest(_text(message, "proof"), _proof(self._token, "caller", self.claimed, self._nonce)):
            raise StrangerError("said it was rank %s, but does not know this run's token" % self.claimed["rank"])
        self.hello = self.claimed
        return b""
