"""Text that goes to a node's shell, and the markers that separate a script's output from other output. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# dd reads byte by byte, because the bytes after the script are the script's input.
_BODY = (
    "read -r cc_n cc_t; "
    'cc_s=$(dd bs=1 count="$cc_n" 2>/dev/null; echo x); '
    'echo "@clusterctl:$cc_t:begin:GROUP:"; echo "@clusterctl:$cc_t:begin:GROUP:" >&2; '
    '(eval "${cc_s%x}"); cc_n=$?; '
    'echo "@clusterctl:$cc_t:end:$cc_n:"; echo "@clusterctl:$cc_t:end:$cc_n:" >&2; '
    'exit "$cc_n"'
)

# Every login shell must parse this equally: no '!' and no newline (csh), no backslash (fish), no inner quotes.
BOOTSTRAP = "exec sh -c '" + _BODY.replace("GROUP", "$$") + "'"

# The same as root, for ``sh -c SCRIPT sh TOKEN GROUP``. It reports that it is ready before it reads, because sudo must
# not read its input. Its shell always exits with 0, since 1 is sudo's exit code for a refusal. The folder and the
# locale are those of a root login where possible.
AS_ROOT = (
    'cc_g=$2; unset LC_ALL; cd 2>/dev/null || cd /; echo "@clusterctl:$1:ready:" >&2; shift 2; '
    "(" + _BODY.replace("GROUP", "$cc_g") + "); exit 0"
)


def frame(script: str, token: str) -> bytes:
    """The input of a bootstrap: a line with the script's length in bytes and the token, then the script."""
    body = script.encode("utf-8", "surrogateescape")
    return f"{len(body)} {token}\n".encode() + body


JUNK_LIMIT = 1 << 20  # bytes before the begin marker: output of rc files, and a banner
LINE_LIMIT = 1 << 20  # bytes of a line; a longer one is delivered in pieces
TOTAL_LIMIT = 256 << 20  # bytes of an output that is kept in memory
TAIL = 64 << 10  # bytes of stderr to keep when stdout is delivered by line

CUT = " … (cut: the line is longer than 1 MiB)"  # ends every piece but the last
_SKIPPED = "(the first {} bytes are not shown)\n"


class OutputTooLong(Exception):  # noqa: N818 - never leaves this package
    """A node sent more than a limit allows; the message names the limit, and ``hint`` the fix."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Framed:
    """The part of one output of the remote command between its markers.

    Args:
        token: the token in the markers.
        on_line: receives each line as it arrives; the output may then have any length. A line over ``LINE_LIMIT`` comes
            in pieces, which end with ``CUT`` except for the last.
        keep: bytes to keep without ``on_line``; None keeps all, up to ``TOTAL_LIMIT``.
        name: names the output in messages.
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
        # A process id has at most 7 digits and an exit code 3; with more digits it is not the bootstrap's marker.
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
        """Whether the begin marker has arrived."""
        return self.group is not None

    @property
    def ended(self) -> bool:
        """Whether the end marker has arrived."""
        return self.rc is not None

    def feed(self, data: bytes) -> None:
        """Take the next bytes; bytes after the end marker are dropped.

        Raises:
            OutputTooLong: a limit is exceeded.
        """
        if self.ended:
            return
        self._buffer += data
        if not self.begun:
            begin = self._begin.search(self._buffer, max(0, self._searched - self._longest))
            self._searched = len(self._buffer)
            # The last bytes may be an incomplete marker and do not count.
            if (begin.start() if begin else len(self._buffer) - self._longest) > JUNK_LIMIT:
                raise OutputTooLong(
                    f"the login shell printed more than {_mib(JUNK_LIMIT)} before the script started",
                    "change the user's rc files on the node so that they print nothing without a terminal",
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
            self._deliver(self._on_line, fresh)
        elif self._keep is not None:
            self._drop(self._keep)
        elif len(self._buffer) - (0 if self.ended else self._longest) > TOTAL_LIMIT:
            raise OutputTooLong(
                f"its {self._name} is larger than {_mib(TOTAL_LIMIT)}",
                "write long output to a file on the node",
            )

    def _deliver(self, on_line: Callable[[str], None], fresh: int) -> None:
        """Deliver the complete lines. The buffer contains no newline before ``fresh``."""
        last = self._buffer.rfind(b"\n", min(fresh, len(self._buffer)))
        lines = bytes(self._buffer[:last]).split(b"\n") if last >= 0 else []
        del self._buffer[: last + 1]
        if self.ended and self._buffer:
            lines.append(bytes(self._buffer))
            self._buffer.clear()
        for line in lines:
            for piece in _pieces(line):
                on_line(piece)
        while len(self._buffer) > LINE_LIMIT + self._longest:  # its end may be the start of a marker
            at = _character(self._buffer, LINE_LIMIT)
            piece = decode(self._buffer[:at]) + CUT
            del self._buffer[:at]
            on_line(piece)
        self._searched = len(self._buffer)

    def _drop(self, keep: int) -> None:
        """Drop the oldest bytes, once the buffer has twice the size to keep."""
        if len(self._buffer) > 2 * (keep + self._longest):
            self._skipped += len(self._buffer) - keep - self._longest
            del self._buffer[: -keep - self._longest]
            self._searched = len(self._buffer)

    def text(self) -> str:
        """The output that was not delivered by line."""
        return (_SKIPPED.format(self._skipped) if self._skipped else "") + decode(self._buffer)


def _pieces(line: bytes) -> Iterator[str]:
    """The pieces in which a line is delivered."""
    while len(line) > LINE_LIMIT:
        at = _character(line, LINE_LIMIT)
        yield decode(line[:at]) + CUT
        line = line[at:]
    yield decode(line)


def _character(data: bytes | bytearray, at: int) -> int:
    """``at``, or the start of the character that contains it."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def _mib(count: int) -> str:
    return f"{count >> 20} MiB"


def sent_length(line: str) -> int:
    """The number of output bytes that a delivered line represents."""
    text = line.removesuffix(CUT)
    return len(text.encode("utf-8", "surrogateescape")) + (text == line)  # a newline ends it


def decode(data: bytes | bytearray) -> str:
    """Decode UTF-8; other bytes become surrogates, so that file names keep them."""
    return data.decode("utf-8", "surrogateescape")
