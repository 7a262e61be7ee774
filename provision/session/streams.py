"""A stream of lines from every node, which survives broken connections.

The run continues on the nodes without a connection. The user is warned once about a connection that stays broken for a
while. Connecting is retried until it succeeds or the stream is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from provision.model import Emit, Node, Notice
from provision.ssh.wire import HostKeyChanged, RemoteError

if TYPE_CHECKING:
    from provision.model import Remote

BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between attempts; the last one repeats
AWAY = 10.0  # seconds without a connection until the user is warned
QUIET = 10.0  # seconds without a line until the connection is tested
ANSWER = 10.0  # seconds for the test
SETTLED = 2.0  # seconds that a connection without lines must last to count
TRIES = 3  # scripts that end without a line until a node fails


class Pool(Protocol):
    """The part of ``ssh.remote.Connections`` that streams need."""

    def __getitem__(self, node: Node) -> Remote:
        """The connection to a node; a new one if it broke."""
        ...


class Stream:
    """The lines of one node. Call ``run`` in its own thread.

    ``script`` writes the script that prints every line from the current offset on; ``line`` receives a line and returns
    whether it was the last one. With ``ends``, a script that succeeds has printed everything.
    """

    def __init__(
        self, node: Node, pool: Pool, script: Callable[[], str], line: Callable[[str], bool], *, ends: bool = False
    ) -> None:
        self.node = node
        self.warned = False  # the user was warned about the lost connection
        self.over = threading.Event()
        self.failure: str | None = None  # why the stream failed
        self.bug: Exception | None = None  # an exception in the thread that reads
        self._pool, self._script, self._line = pool, script, line
        self._ends = ends
        self._away_since: float | None = None  # monotonic
        self._back_at: float | None = None  # when it was connected again, until a line comes
        self._lines = 0
        self._heard = time.monotonic()
        self._trying = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Read to the last line."""
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - ``Streams.check`` raises it in the thread that waits
            self.bug = error
        finally:
            self.over.set()

    def _read(self) -> None:
        tries = 0
        while not self.over.is_set() and not self._closed.is_set():
            before = self._lines
            try:
                remote = self._pool[self.node]
                self._connected()
                result = remote.run(self._script(), on_line=self._take)
            except HostKeyChanged as error:
                self.failure = error.reason
                return
            except RemoteError:
                self._lost()
            else:
                if self._ends and result.rc == 0:
                    return
                if self._lines == before and not self.over.is_set() and tries + 1 >= TRIES:
                    self.failure = result.err.strip() or f"the script ended with status {result.rc}"
                    return
            tries = tries + 1 if self._lines == before else 0
            if not self.over.is_set():
                self._closed.wait(BACKOFF[min(tries, len(BACKOFF) - 1)])

    def close(self) -> None:
        """Stop trying."""
        self._closed.set()

    def away(self) -> float:
        """Seconds without a connection; one that breaks at once does not count as a connection."""
        now = time.monotonic()
        if self._back_at is not None and now - self._back_at >= SETTLED:
            self._away_since = None
        since = self._away_since
        return 0.0 if since is None else now - since

    def test(self) -> None:
        """Test the connection if no line has come for a while, and close it if it is dead.

        A machine that is switched off is as silent as a run that prints nothing. Returns at once; another thread waits
        for the answer.
        """
        if self._trying or self.over.is_set() or self.away() or time.monotonic() - self._heard < QUIET:
            return
        self._trying = True
        threading.Thread(target=self._ping, name=f"ping-{self.node.name}", daemon=True).start()

    def _ping(self) -> None:
        try:
            remote = self._pool[self.node]
            try:
                remote.run("true", deadline=ANSWER)
                self._heard = time.monotonic()
            except RemoteError:
                self._lost()
                remote.close()  # ends the running script, and with it the wait
        except RemoteError:
            self._lost()
        finally:
            self._trying = False

    def _connected(self) -> None:
        self._heard = self._back_at = time.monotonic()

    def _take(self, text: str) -> None:
        self._lines += 1
        self._heard = time.monotonic()
        self._away_since = None
        if self._line(text):
            self.over.set()

    def _lost(self) -> None:
        self._back_at = None
        if self._away_since is None and not self.over.is_set():
            self._away_since = time.monotonic()


class Streams:
    """The streams of several nodes. Call ``check`` about once a second, from one thread."""

    def __init__(self, streams: Sequence[Stream], emit: Emit) -> None:
        self.streams = tuple(streams)
        self._emit = emit

    def start(self) -> None:
        """Start reading from every node."""
        for stream in self.streams:
            threading.Thread(target=stream.run, name=f"follow-{stream.node.name}", daemon=True).start()

    def check(self) -> None:
        """Test quiet connections and report lost and restored ones. Raises the error that ended a stream."""
        for stream in self.streams:
            if stream.bug is not None:
                raise stream.bug
            stream.test()
            name, away = stream.node.name, stream.away()
            if stream.over.is_set():
                continue
            if away >= AWAY and not stream.warned:
                stream.warned = True
                self._emit(
                    Notice(f"no connection to {name} for {away:.0f} s; the run is still running there", "warning")
                )
            elif stream.warned and not away:
                stream.warned = False
                self._emit(Notice(f"the connection to {name} is back"))

    def close(self) -> None:
        """Stop reading. The run on the nodes is not affected."""
        for stream in self.streams:
            stream.close()
