"""What is said to a node's shell, and how its answer is told from everything else that is printed there. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# dd reads byte by byte, since everything behind the script belongs to the script.
_BODY = (
    "read -r cc_n cc_t; "
    'cc_s=$(dd bs=1 count="$cc_n" 2>/dev/null; echo x); '
    'echo "@clusterctl:$cc_t:begin:GROUP:"; echo "@clusterctl:$cc_t:begin:GROUP:" >&2; '
    '(eval "${cc_s%x}"); cc_n=$?; '
    'echo "@clusterctl:$cc_t:end:$cc_n:"; echo "@clusterctl:$cc_t:end:$cc_n:" >&2; '
    'exit "$cc_n"'
)

# Every login shell must read this as the same words: no '!' and no newline (csh), no backslash (fish), no inner quote.
BOOTSTRAP = "exec sh -c '" + _BODY.replace("GROUP", "$$") + "'"

# The same as root, for ``sh -c SCRIPT sh TOKEN GROUP``: says that it is there before it reads, since what is sent to it
# must not be read by sudo. Its shell exits with 0 however the script ends: 1 is sudo's own word for a refusal. The
# folder and the locale are those of root's own login, as far as that is possible.
AS_ROOT = (
    'cc_g=$2; unset LC_ALL; cd 2>/dev/null || cd /; echo "@clusterctl:$1:ready:" >&2; shift 2; '
    "(" + _BODY.replace("GROUP", "$cc_g") + "); exit 0"
)


def frame(script: str, token: str) -> bytes:
    """What a bootstrap reads: a line with the script's length in bytes and the token, and the script."""
    body = script.encode("utf-8", "surrogateescape")
    return f"{len(body)} {token}\n".encode() + body


class Framed:
    """One output of the remote command, between its markers."""

    def __init__(self, token: str, on_line: Callable[[str], None] | None = None) -> None:
        self.group: int | None = None
        self.rc: int | None = None
        self._begin = re.compile(f"@clusterctl:{token}:begin:([0-9]+):\n".encode())
        self._end = re.compile(f"@clusterctl:{token}:end:([0-9]+):\n".encode())
        self._longest = len(token) + 48  # of a marker
        self._on_line = on_line
        self._buffer = bytearray()
        self._searched = 0

    @property
    def begun(self) -> bool:
        """Whether the begin marker has come."""
        return self.group is not None

    @property
    def ended(self) -> bool:
        """Whether the end marker has come."""
        return self.rc is not None

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._buffer += data
        if not self.begun:
            begin = self._begin.search(self._buffer, max(0, self._searched - self._longest))
            self._searched = len(self._buffer)
            if not begin:
                return
            self.group = int(begin[1])
            del self._buffer[: begin.end()]
            self._searched = 0
        if end := self._end.search(self._buffer, max(0, self._searched - self._longest)):
            self.rc = int(end[1])
            del self._buffer[end.start() :]
        self._searched = len(self._buffer)
        if self._on_line:
            self._hand_out(self._on_line)

    def _hand_out(self, on_line: Callable[[str], None]) -> None:
        complete, newline, rest = self._buffer.rpartition(b"\n")
        self._buffer = bytearray(rest)
        self._searched = len(rest)
        lines = complete.split(b"\n") if newline else []
        if self.ended and rest:
            lines.append(rest)
            self._buffer.clear()
        for line in lines:
            on_line(decode(line))

    def text(self) -> str:
        """Everything that was not handed out by the line."""
        return decode(self._buffer)


def decode(data: bytes | bytearray) -> str:
    """UTF-8; bytes that are none survive as surrogates, for file names that come back."""
    return data.decode("utf-8", "surrogateescape")
