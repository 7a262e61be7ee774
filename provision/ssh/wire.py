"""The protocol by which a script reaches a node and its answer comes back, over any byte stream.

The remote command is a constant. Its standard input receives a line ``LENGTH TOKEN``, the script, and then the script's
own standard input. Both outputs carry a begin marker with the process group and an end marker with the exit code;
output before the begin marker, such as that of rc files, is dropped. So a script's end is known even if a background
process holds the outputs open, and a broken connection is never mistaken for an end. A script that runs as root is
passed on by another one; see ``become``.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

from provision.errors import ClusterctlError, Reason
from provision.model import Node, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Ends a script's process group. It runs as a separate script, because sshd passes no signals to root's sessions.
STOP = "kill -TERM -{group}"


class RemoteError(ClusterctlError):
    """An error of one node or of its connection. ``reason`` is the message without the node's name."""

    exit_code: ClassVar[int] = 5

    def __init__(self, node: Node, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{node.name}: {reason}", hint=hint)
        self.node = node.name
        self.reason = reason if isinstance(reason, Reason) else Reason.about(reason, node.name, node.address, node.port)


class NodeUnreachable(RemoteError):  # noqa: N818 - the state of a node
    """No connection, no login, or the connection broke; ``reason`` names the cause."""


class HostKeyUnknown(NodeUnreachable):
    """The node's host key is not pinned, and the user did not confirm it."""


class HostKeyChanged(NodeUnreachable):
    """The node's host key differs from the pinned one. Always refused."""


class RootRefused(RemoteError):  # noqa: N818 - the state of a node
    """The node does not allow a script to run as root; ``reason`` says why."""


class PortRefused(RemoteError):  # noqa: N818 - the state of a node
    """The node accepts no connection to one of its ports; ``reason`` says why."""


class DeadlineExceeded(RemoteError):  # noqa: N818 - the name in model.Remote
    """The script did not finish before its deadline, and was stopped."""


class AnswerUnreadable(RemoteError):  # noqa: N818 - the state of a node
    """The node's answer does not have the format of clusterctl's scripts."""


def too_long(node: Node, error: OutputTooLong) -> NodeUnreachable:
    """The error of a node whose output exceeded a limit."""
    return NodeUnreachable(node, str(error), hint=error.hint)


@contextmanager
def reading(node: Node) -> Iterator[None]:
    """Parse a node's answer in this block: an error of the parser becomes an error of the node.

    Raises:
        AnswerUnreadable: the answer has an unexpected number, field or word.
    """
    try:
        yield
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:120].encode("ascii", "backslashreplace").decode() or type(error).__name__
        raise AnswerUnreadable(
            node,
            f"its answer cannot be parsed ({why})",
            hint=f"does a login script there print to stdout? clusterctl run --limit {node.name} -- true",
        ) from error


class Stream(Protocol):
    """A remote command that was started: two outputs and an input. Every method may be called from any thread."""

    group: int | None  # the process group on the node; None until it is known

    def read_out(self) -> bytes:
        """Some bytes of stdout; empty at its end."""
        ...

    def read_err(self) -> bytes:
        """Some bytes of stderr; empty at its end."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises OSError if the command no longer reads."""
        ...

    def finish(self) -> None:
        """End the input."""
        ...

    def abort(self) -> None:
        """Stop the command without ending its input, and wake the threads that read or write."""
        ...

    def close(self) -> None:
        """Free the stream's resources."""
        ...


class Escalation(Protocol):
    """Starts a root shell, to which the script is then sent."""

    head: bytes  # written first
    settled: threading.Event  # ``become_root`` has returned

    def feed_err(self, data: bytes) -> None:
        """Take stderr's bytes from before the script starts; empty at its end."""
        ...

    def become_root(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:
        """Return when the script can be sent, or False if the stream has ended; calls ``waiting`` to ask the user.

        Raises:
            RemoteError: the script cannot run.
        """
        ...

    def give_up(self) -> None:
        """End ``become_root``: the stream has ended."""
        ...


class _NoEscalation:
    """The ``Escalation`` of a script that runs as the ssh user."""

    head = b""

    def __init__(self) -> None:
        self.settled = threading.Event()
        self.settled.set()

    def feed_err(self, data: bytes) -> None:
        pass

    def become_root(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:  # noqa: ARG002
        return True

    def give_up(self) -> None:
        pass


class Broken(Exception):  # noqa: N818 - never leaves this package
    """The stream ended before the script did."""

    def __init__(self, *, begun: bool, out: str, err: str) -> None:
        super().__init__(out, err)
        self.begun = begun
        self.out = out
        self.err = err


class Expired(Exception):  # noqa: N818 - never leaves this package
    """The deadline has passed."""


def converse(
    stream: Stream,
    script: str,
    *,
    stdin: Iterable[bytes] | None = None,
    on_line: Callable[[str], None] | None = None,
    deadline: float | None = None,
    escalation: Escalation | None = None,
) -> Result:
    """Send ``script`` and ``stdin`` to a started ``BOOTSTRAP`` and read its answer at the same time.

    An exception from ``stdin`` or ``on_line`` aborts the stream and is raised here. With an ``escalation`` the deadline
    starts when the script is sent, so that the time to type a password does not count.

    Raises:
        Broken: the stream ended without the end marker.
        Expired: ``deadline`` seconds have passed.
        OutputTooLong: the node sent more output than a limit allows.
    """
    started = time.monotonic()
    escalation = escalation or _NoEscalation()
    token = secrets.token_hex(8)
    out = Framed(token, on_line)
    err = Framed(token, keep=TAIL if on_line else None, name="error output")
    expiry = _Expiry(stream, deadline)
    feeder = _Feeder(stream, frame(script, token), stdin, escalation, expiry)

    errors = _Errors(stream, err, escalation, feeder.begun)
    with expiry:
        try:
            errors.start()
            feeder.start()
            while not out.ended and (data := stream.read_out()):
                try:
                    out.feed(data)
                finally:  # the first bytes may already be too many, and the script has to be stopped then
                    if out.begun:
                        stream.group = out.group
                        feeder.begun.set()
            errors.join(None if out.ended else 2)  # after a broken stream, a child of ssh may hold stderr open
        except BaseException:
            stream.abort()
            raise
        finally:
            feeder.stop.set()
            feeder.begun.set()
            escalation.give_up()
            stream.close()
    if not out.begun:
        escalation.settled.wait(5)  # it may still find the reason
    if failure := errors.failure or feeder.failure:
        raise failure
    if out.rc is None:
        raise Expired if expiry.expired else Broken(begun=out.begun, out=out.text(), err=err.text())
    return Result(out.rc, out.text(), err.text(), time.monotonic() - started)


def drain(stream: Stream, seconds: float = 2.0) -> None:
    """Drop a stopped script's output until it ends. A trap that prints to a closed pipe dies before it cleans up.

    sh itself prints there: dash reports the command that the signal killed.
    """
    until = time.monotonic() + seconds
    readers = [
        threading.Thread(target=lambda read=read: all(iter(read, b"")), daemon=True)
        for read in (stream.read_out, stream.read_err)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(max(0.0, until - time.monotonic()))


class _Errors(threading.Thread):
    """Reads stderr to its end marker."""

    def __init__(self, stream: Stream, err: Framed, escalation: Escalation, begun: threading.Event) -> None:
        super().__init__(daemon=True)
        self.failure: OutputTooLong | None = None
        self._stream, self._err, self._handover, self._begun = stream, err, escalation, begun

    def run(self) -> None:
        try:
            while not self._err.ended and (data := self._stream.read_err()):
                if not self._err.begun:
                    self._handover.feed_err(data)
                self._err.feed(data)
        except OutputTooLong as error:
            self.failure = error
            self._begun.wait(10)  # until stdout has the process group to stop
            self._stream.abort()  # wakes the thread that reads stdout
        finally:
            self._handover.feed_err(b"")


class _Expiry:
    """Aborts a stream at its deadline."""

    def __init__(self, stream: Stream, seconds: float | None) -> None:
        self.expired = False
        self._stream = stream
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._over = False

    def start(self) -> None:
        """Start the countdown."""
        with self._lock:
            self._cancel()
            if self._seconds is not None and not self._over:
                self._timer = threading.Timer(self._seconds, self._expire)
                self._timer.daemon = True
                self._timer.start()

    def pause(self) -> None:
        """Stop the countdown until the next ``start``."""
        with self._lock:
            self._cancel()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_error: object) -> None:
        self._over = True
        self.pause()

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._stream.abort()


class _Feeder(threading.Thread):
    """Writes the input. No thread waits for this one, because the caller's iterator may block for long."""

    def __init__(
        self, stream: Stream, head: bytes, blocks: Iterable[bytes] | None, escalation: Escalation, expiry: _Expiry
    ) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._stream = stream
        self._head = head
        self._blocks = blocks
        self._handover = escalation
        self._expiry = expiry

    def run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.failure = error
            self._stream.abort()

    def _send(self) -> None:
        if not self._write(self._handover.head) or not self._handover.become_root(self._write, self._expiry.pause):
            return
        self._expiry.start()
        if not self._write(self._head):
            return
        if self._blocks is not None:
            self.begun.wait()  # from now on the script can be stopped if its input fails
            for block in self._blocks:
                if self.stop.is_set() or not self._write(block):
                    return
        try:
            self._stream.finish()
        except OSError:
            return

    def _write(self, data: bytes) -> bool:
        """Whether the script still reads; it may end before it has read everything."""
        try:
            self._stream.write(data)
        except OSError:
            return False
        return True


# The bytes after the script are the script's input, so dd must not read further. A dd without ``fullblock`` reads
# nothing, and then each byte alone, at tens of milliseconds of processor time for a script.
_BODY = (
    "read -r cc_n cc_t; "
    'cc_s=$({ dd bs="$cc_n" count=1 iflag=fullblock || dd bs=1 count="$cc_n"; } 2>/dev/null; echo x); '
    'echo "@clusterctl:$cc_t:begin:GROUP:"; echo "@clusterctl:$cc_t:begin:GROUP:" >&2; '
    '(eval "${cc_s%x}"); cc_n=$?; '
    'echo "@clusterctl:$cc_t:end:$cc_n:"; echo "@clusterctl:$cc_t:end:$cc_n:" >&2; '
    'exit "$cc_n"'
)

# Every login shell must parse this equally: no '!' and no newline (csh), no backslash (fish), no inner quotes.
BOOTSTRAP = "exec sh -c '" + _BODY.replace("GROUP", "$$") + "'"

# The same as root, for ``sh -c SCRIPT sh TOKEN GROUP``. It reports that it is ready before it reads, because sudo must
# not read its input. Its shell always exits with 0, since 1 is sudo's exit code for a refusal. The folder and the
# locale are a root login's if possible.
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
    """A node sent more output than a limit allows; the message names the limit, and ``hint`` the fix."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


# A process id has at most 7 digits and an exit code 3; with more digits it is not the bootstrap's marker.
_GROUP = re.compile(rb"([0-9]{1,10}):\n")
_STATUS = re.compile(rb"([0-9]{1,3}):\n")


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
        self._begin = f"@clusterctl:{token}:begin:".encode()
        self._end = f"@clusterctl:{token}:end:".encode()
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
            begin = _marker(self._begin, _GROUP, self._buffer, max(0, self._searched - self._longest))
            self._searched = len(self._buffer)
            # The last bytes may be an incomplete marker and do not count.
            if (begin[0] if begin else len(self._buffer) - self._longest) > JUNK_LIMIT:
                raise OutputTooLong(
                    f"the login shell printed more than {_mib(JUNK_LIMIT)} before the script started",
                    "change the user's rc files on the node so that they print nothing without a terminal",
                )
            if not begin:
                return
            _, end, self.group = begin
            del self._buffer[:end]
            self._searched = 0
        fresh = self._searched
        if ended := _marker(self._end, _STATUS, self._buffer, max(0, self._searched - self._longest)):
            start, _, self.rc = ended
            del self._buffer[start:]
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


def _marker(head: bytes, number: re.Pattern[bytes], buffer: bytearray, start: int) -> tuple[int, int, int] | None:
    """Where the first complete marker starts and ends, and its number. A pattern for each token would cost more."""
    while (start := buffer.find(head, start)) >= 0:
        if found := number.match(buffer, start + len(head)):
            return start, found.end(), int(found[1])
        start += 1
    return None


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
