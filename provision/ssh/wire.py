"""How a script travels to a node and its answer back, whatever carries the bytes.

The remote command is one constant text. Through its standard input go a line ``LENGTH TOKEN``, the script, and then the
bytes for the script's own standard input. Back come, on both outputs, a begin marker with the
process group (what an rc file printed before it is dropped) and an end marker with the exit code: so a script has ended
when it says so, even where a background process still holds the connection's outputs open, and a broken connection is
never mistaken for an end.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

from provision.errors import ClusterctlError
from provision.model import Node, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Every login shell must read this as the same words: no '!' and no newline (csh), no backslash (fish), no inner quote.
# dd reads byte by byte, since everything behind the script belongs to the script.
BOOTSTRAP = (
    "exec sh -c '"
    "read -r cc_n cc_t; "
    'cc_s=$(dd bs=1 count="$cc_n" 2>/dev/null; echo x); '
    'echo "@clusterctl:$cc_t:begin:$$:"; echo "@clusterctl:$cc_t:begin:$$:" >&2; '
    '(eval "${cc_s%x}"); cc_n=$?; '
    'echo "@clusterctl:$cc_t:end:$cc_n:"; echo "@clusterctl:$cc_t:end:$cc_n:" >&2; '
    'exit "$cc_n"'
    "'"
)


# What ends the process group of a script: run as a script of its own, since sshd passes no signals to root's sessions.
STOP = "kill -TERM -{group}"


class RemoteError(ClusterctlError):
    """Something between here and one node. ``reason`` is the message without the node's name."""

    exit_code: ClassVar[int] = 5

    def __init__(self, node: Node, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{node.name}: {reason}", hint=hint)
        self.node = node.name
        self.reason = reason


class NodeUnreachable(RemoteError):  # noqa: N818 - the state of a node
    """No connection, no login, or the connection broke; ``reason`` names the cause."""


class HostKeyUnknown(NodeUnreachable):
    """The node's host key is not pinned, and nobody could or would confirm it."""


class HostKeyChanged(NodeUnreachable):
    """The node shows another host key than the pinned one. Always refused."""


class DeadlineExceeded(RemoteError):  # noqa: N818 - the name that the protocol gives it
    """The script was given up after its deadline."""


class Stream(Protocol):
    """A remote command that was started: two outputs and an input. Every method may be called from any thread."""

    group: int | None  # the process group on the node, once it is known

    def read_out(self) -> bytes:
        """Some bytes of stdout; empty at its end."""
        ...

    def read_err(self) -> bytes:
        """Some bytes of stderr; empty at its end."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises OSError when nobody takes it any more."""
        ...

    def finish(self) -> None:
        """The input is complete."""
        ...

    def abort(self) -> None:
        """Stop the command as well as possible without completing its input, and wake whoever reads or writes."""
        ...

    def close(self) -> None:
        """Free what this holds."""
        ...


class Broken(Exception):  # noqa: N818 - never leaves this package
    """The stream ended before the script did."""

    def __init__(self, *, begun: bool, out: str, err: str) -> None:
        super().__init__(out, err)
        self.begun = begun
        self.out = out
        self.err = err


class Expired(Exception):  # noqa: N818 - never leaves this package
    """The deadline has passed."""


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


def converse(
    stream: Stream,
    script: str,
    *,
    stdin: Iterable[bytes] | None = None,
    on_line: Callable[[str], None] | None = None,
    deadline: float | None = None,
) -> Result:
    """Send ``script`` and ``stdin`` to a started ``BOOTSTRAP`` and take its answer; both flow at the same time.

    An exception from ``stdin`` or ``on_line`` aborts the stream and is raised here.

    Raises:
        Broken: the stream ended without the end marker.
        Expired: ``deadline`` seconds have passed.
    """
    started = time.monotonic()
    token = secrets.token_hex(8)
    body = script.encode("utf-8", "surrogateescape")
    out, err = Framed(token, on_line), Framed(token)
    feeder = _Feeder(stream, f"{len(body)} {token}\n".encode() + body, stdin)

    def drain_errors() -> None:
        while not err.ended and (data := stream.read_err()):
            err.feed(data)

    errors = threading.Thread(target=drain_errors, daemon=True)
    with _expiring(stream, deadline) as expired:
        try:
            errors.start()
            feeder.start()
            while not out.ended and (data := stream.read_out()):
                out.feed(data)
                if out.begun:
                    stream.group = out.group
                    feeder.begun.set()
            errors.join(None if out.ended else 2)  # after a broken stream a helper of ssh may hold stderr open
        except BaseException:
            stream.abort()
            raise
        finally:
            feeder.stop.set()
            feeder.begun.set()
            stream.close()
    if feeder.failure:
        raise feeder.failure
    if out.rc is None:
        raise Expired if expired.is_set() else Broken(begun=out.begun, out=out.text(), err=err.text())
    return Result(out.rc, out.text(), err.text(), time.monotonic() - started)


@contextmanager
def _expiring(stream: Stream, deadline: float | None) -> Iterator[threading.Event]:
    """Abort ``stream`` after ``deadline`` seconds, and set the event then."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        stream.abort()

    timer = threading.Timer(deadline, expire) if deadline is not None else None
    if timer:
        timer.daemon = True
        timer.start()
    try:
        yield expired
    finally:
        if timer:
            timer.cancel()


class _Feeder(threading.Thread):
    """Writes the input. A thread of its own that nobody waits for: the caller's iterator may block for long."""

    def __init__(self, stream: Stream, head: bytes, blocks: Iterable[bytes] | None) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._stream = stream
        self._head = head
        self._blocks = blocks

    def run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - the caller's own error, raised where the caller waits
            self.failure = error
            self._stream.abort()

    def _send(self) -> None:
        if not self._write(self._head):
            return
        if self._blocks is not None:
            self.begun.wait()  # from here on the script can be stopped, should its input break off
            for block in self._blocks:
                if self.stop.is_set() or not self._write(block):
                    return
        try:
            self._stream.finish()
        except OSError:
            return

    def _write(self, data: bytes) -> bool:
        """Whether somebody still takes data: a script may end before it has read everything."""
        try:
            self._stream.write(data)
        except OSError:
            return False
        return True
