"""What is said to a node's shell, and how its answer is told from everything else that is printed there. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


JUNK_LIMIT = 1 << 20  # bytes before the begin marker: what rc files print, and a banner
LINE_LIMIT = 1 << 20  # bytes of a line that is handed out; a longer one is handed out in pieces
TOTAL_LIMIT = 256 << 20  # bytes of an output that is kept as a whole
TAIL = 64 << 10  # bytes of stderr that are kept where stdout is handed out by the line

CUT = " … (cut: the line is longer than 1 MiB)"  # at the end of a piece that is not the last
_SKIPPED = "(the first {} bytes are not shown)\n"


class OutputTooLong(Exception):  # noqa: N818 - never leaves this package
    """A node sends more than a limit allows; the message names the limit, and ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Framed:
    """One output of the remote command, between its markers.

    Args:
        token: what the markers hold.
        on_line: takes every line as it arrives; such an output may be of any length. A line over ``LINE_LIMIT`` comes
            in pieces, all but the last with ``CUT`` at their end.
        keep: bytes to keep of an output that is not handed out; None: all, up to ``TOTAL_LIMIT``.
        name: of the output, for messages.
    """

    def __init__(
        self,
        token: str,
        on_line: Callable[[str], None] | None = None,
        *,
        keep: int | None = None,
        name: str = "output",
    ) -> None:
        self.group: int | None = None
        self.rc: int | None = None
        # The kernel's largest process id has 7 digits, and an exit code 3: more of them are no marker of the bootstrap.
        self._begin = re.compile(f"@clusterctl:{token}:begin:([0-9]{{1,10}}):\n".encode())
        self._end = re.compile(f"@clusterctl:{token}:end:([0-9]{{1,3}}):\n".encode())
        self._longest = len(token) + 48  # of a marker
        self._on_line = on_line
        self._keep = keep
        self._name = name
        self._buffer = bytearray()
        self._searched = 0
        self._skipped = 0

    @property
    def begun(self) -> bool:
        """Whether the begin marker has come."""
        return self.group is not None

    @property
    def ended(self) -> bool:
        """Whether the end marker has come."""
        return self.rc is not None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; what comes after the end marker is dropped.

        Raises:
            OutputTooLong: a limit is exceeded.
        """
        if self.ended:
            return
        self._buffer += data
        if not self.begun:
            begin = self._begin.search(self._buffer, max(0, self._searched - self._longest))
            self._searched = len(self._buffer)
            # What is not complete may be the marker: it does not count.
            if (begin.start() if begin else len(self._buffer) - self._longest) > JUNK_LIMIT:
                raise OutputTooLong(
                    f"the login shell printed more than {_mib(JUNK_LIMIT)} before the script started",
                    "let the user's rc files on the node print nothing where there is no terminal",
                )
            if not begin:
                return
            self.group = int(begin[1])
            del self._buffer[: begin.end()]
            self._searched = 0
        fresh = self._searched
        if end := self._end.search(self._buffer, max(0, self._searched - self._longest)):
            self.rc = int(end[1])
            del self._buffer[end.start() :]
        self._searched = len(self._buffer)
        if self._on_line:
            self._hand_out(self._on_line, fresh)
        elif self._keep is not None:
            self._drop(self._keep)
        elif len(self._buffer) - (0 if self.ended else self._longest) > TOTAL_LIMIT:
            raise OutputTooLong(
                f"its {self._name} is larger than {_mib(TOTAL_LIMIT)}",
                "write long output to a file on the node",
            )

    def _hand_out(self, on_line: Callable[[str], None], fresh: int) -> None:
        """Hand out what is complete. No newline is in the buffer before ``fresh``."""
        last = self._buffer.rfind(b"\n", min(fresh, len(self._buffer)))
        lines = bytes(self._buffer[:last]).split(b"\n") if last >= 0 else []
        del self._buffer[: last + 1]
        if self.ended and self._buffer:
            lines.append(bytes(self._buffer))
            self._buffer.clear()
        for line in lines:
            for piece in _pieces(line):
                on_line(piece)
        while len(self._buffer) > LINE_LIMIT + self._longest:  # its end may be the beginning of a marker
            at = _character(self._buffer, LINE_LIMIT)
            piece = decode(self._buffer[:at]) + CUT
            del self._buffer[:at]
            on_line(piece)
        self._searched = len(self._buffer)

    def _drop(self, keep: int) -> None:
        """Drop the beginning, once there is twice as much as is kept."""
        if len(self._buffer) > 2 * (keep + self._longest):
            self._skipped += len(self._buffer) - keep - self._longest
            del self._buffer[: -keep - self._longest]
            self._searched = len(self._buffer)

    def text(self) -> str:
        """Everything that was not handed out by the line."""
        return (_SKIPPED.format(self._skipped) if self._skipped else "") + decode(self._buffer)


def _pieces(line: bytes) -> Iterator[str]:
    """A line as it is handed out."""
    while len(line) > LINE_LIMIT:
        at = _character(line, LINE_LIMIT)
        yield decode(line[:at]) + CUT
        line = line[at:]
    yield decode(line)


def _character(data: bytes | bytearray, at: int) -> int:
    """``at``, or the beginning of the character that it is in."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"


def sent_length(line: str) -> int:
    """How many bytes of the output a line stands for that was handed out."""
    text = line.removesuffix(CUT)
    return len(text.encode("utf-8", "surrogateescape")) + (text == line)  # a newline ends it


def decode(data: bytes | bytearray) -> str:
    """UTF-8; bytes that are none survive as surrogates, for file names that come back."""
    return data.decode("utf-8", "surrogateescape")
