"""How a script travels to a node and its answer back, whatever carries the bytes.

The remote command is one constant text. Through its standard input go a line ``LENGTH TOKEN``, the script, and then the
bytes for the script's own standard input. Back come, on both outputs, a begin marker with the
process group (what an rc file printed before it is dropped) and an end marker with the exit code: so a script has ended
when it says so, even where a background process still holds the connection's outputs open, and a broken connection is
never mistaken for an end. A script that shall run as root is handed on by another one, see ``become``.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, Protocol

from provision.errors import ClusterctlError, Reason
from provision.model import Node, Result
from provision.ssh.framing import TAIL, Framed, OutputTooLong, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# What ends the process group of a script: run as a script of its own, since sshd passes no signals to root's sessions.
STOP = "kill -TERM -{group}"


class RemoteError(ClusterctlError):
    """Something between here and one node. ``reason`` is the message without the node's name."""

    exit_code: ClassVar[int] = 5

    def __init__(self, node: Node, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{node.name}: {reason}", hint=hint)
        self.node = node.name
        self.reason = reason if isinstance(reason, Reason) else Reason.about(reason, node.name, node.address, node.port)


class NodeUnreachable(RemoteError):  # noqa: N818 - the state of a node
    """No connection, no login, or the connection broke; ``reason`` names the cause."""


class HostKeyUnknown(NodeUnreachable):
    """The node's host key is not pinned, and nobody could or would confirm it."""


class HostKeyChanged(NodeUnreachable):
    """The node shows another host key than the pinned one. Always refused."""


class RootRefused(RemoteError):  # noqa: N818 - the state of a node
    """The script was to run as root, and the node does not allow that; ``reason`` says why."""


class DeadlineExceeded(RemoteError):  # noqa: N818 - the name that the protocol gives it
    """The script was given up after its deadline."""


class AnswerUnreadable(RemoteError):  # noqa: N818 - the state of a node
    """The node's answer is not what clusterctl's scripts print."""


def too_long(node: Node, error: OutputTooLong) -> NodeUnreachable:
    """A limit of ``framing`` as this node's failure."""
    return NodeUnreachable(node, str(error), hint=error.hint)


@contextmanager
def reading(node: Node) -> Iterator[None]:
    """Within this, a node's answer is parsed: one that cannot be parsed is a failure of that node.

    Raises:
        AnswerUnreadable: the parser found a number, a field or a word that it does not expect.
    """
    try:
        yield
    except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:120].encode("ascii", "backslashreplace").decode() or type(error).__name__
        raise AnswerUnreadable(
            node,
            f"its answer cannot be read ({why})",
            hint=f"does a program there print in a script's place? clusterctl run --limit {node.name} -- true",
        ) from error


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


class Handover(Protocol):
    """What goes before a script that runs as another user."""

    head: bytes  # the first that is written
    settled: threading.Event  # ``climb`` has ended

    def feed_err(self, data: bytes) -> None:
        """Take what comes on stderr before the script begins; empty at its end."""
        ...

    def climb(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:
        """Return when the script may be written, or False when the stream has ended; ``waiting``: a person is asked.

        Raises:
            RemoteError: it will not run.
        """
        ...

    def give_up(self) -> None:
        """End ``climb``: the stream has ended."""
        ...


class _Straight:
    """The ``Handover`` of a script that needs none."""

    head = b""

    def __init__(self) -> None:
        self.settled = threading.Event()
        self.settled.set()

    def feed_err(self, data: bytes) -> None:
        pass

    def climb(self, write: Callable[[bytes], bool], waiting: Callable[[], None]) -> bool:  # noqa: ARG002
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
    handover: Handover | None = None,
) -> Result:
    """Send ``script`` and ``stdin`` to a started ``BOOTSTRAP`` and take its answer; both flow at the same time.

    An exception from ``stdin`` or ``on_line`` aborts the stream and is raised here. With a ``handover`` the deadline
    counts from the moment when the script is sent: nobody types a password against the clock.

    Raises:
        Broken: the stream ended without the end marker.
        Expired: ``deadline`` seconds have passed.
        OutputTooLong: the node sends more than a limit of ``framing`` allows.
    """
    started = time.monotonic()
    handover = handover or _Straight()
    token = secrets.token_hex(8)
    out = Framed(token, on_line)
    err = Framed(token, keep=TAIL if on_line else None, name="error output")
    expiry = _Expiry(stream, deadline)
    feeder = _Feeder(stream, frame(script, token), stdin, handover, expiry)

    errors = _Errors(stream, err, handover, feeder.begun)
    with expiry:
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
            handover.give_up()
            stream.close()
    if not out.begun:
        handover.settled.wait(5)  # it may still find out why
    if failure := errors.failure or feeder.failure:
        raise failure
    if out.rc is None:
        raise Expired if expiry.expired else Broken(begun=out.begun, out=out.text(), err=err.text())
    return Result(out.rc, out.text(), err.text(), time.monotonic() - started)


class _Errors(threading.Thread):
    """Reads stderr to its end marker."""

    def __init__(self, stream: Stream, err: Framed, handover: Handover, begun: threading.Event) -> None:
        super().__init__(daemon=True)
        self.failure: OutputTooLong | None = None
        self._stream, self._err, self._handover, self._begun = stream, err, handover, begun

    def run(self) -> None:
        try:
            while not self._err.ended and (data := self._stream.read_err()):
                if not self._err.begun:
                    self._handover.feed_err(data)
                self._err.feed(data)
        except OutputTooLong as error:
            self.failure = error
            self._begun.wait(10)  # until stdout has named the process group to stop: it may be read later than this
            self._stream.abort()  # wakes the reader of stdout
        finally:
            self._handover.feed_err(b"")


class _Expiry:
    """Aborts a stream once its time is up."""

    def __init__(self, stream: Stream, seconds: float | None) -> None:
        self.expired = False
        self._stream = stream
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._over = False

    def start(self) -> None:
        """Count from now on."""
        with self._lock:
            self._cancel()
            if self._seconds is not None and not self._over:
                self._timer = threading.Timer(self._seconds, self._expire)
                self._timer.daemon = True
                self._timer.start()

    def pause(self) -> None:
        """Count no more until the next ``start``."""
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
    """Writes the input. A thread of its own that nobody waits for: the caller's iterator may block for long."""

    def __init__(
        self, stream: Stream, head: bytes, blocks: Iterable[bytes] | None, handover: Handover, expiry: _Expiry
    ) -> None:
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._stream = stream
        self._head = head
        self._blocks = blocks
        self._handover = handover
        self._expiry = expiry

    def run(self) -> None:
        try:
            self._send()
        except BaseException as error:  # noqa: BLE001 - the caller's own error, raised where the caller waits
            self.failure = error
            self._stream.abort()

    def _send(self) -> None:
        if not self._write(self._handover.head) or not self._handover.climb(self._write, self._expiry.pause):
            return
        self._expiry.start()
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
