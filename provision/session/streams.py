"""A stream of lines from every node, over as many connections as it takes.

The run is on the nodes; a connection only shows it. The user is told once about a connection that stays broken for a
while. It is tried again until it is back or no longer needed.
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

BACKOFF = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # seconds between attempts; the last one again and again
AWAY = 10.0  # seconds without a connection until the user is told
QUIET = 10.0  # seconds without a line until the connection is tested
ANSWER = 10.0  # seconds for the test
SETTLED = 2.0  # seconds that a connection without lines must last to count
TRIES = 3  # scripts that end without a line, until a node is given up


class Way(Protocol):
    """The part of ``ssh.remote.Connections`` that streams need."""

    def __getitem__(self, node: Node) -> Remote:
        """The connection to a node; a new one if it broke."""
        ...


class Stream:
    """The lines of one node. ``run`` is for its own thread.

    ``script`` makes the script that prints every line from the current offset on; ``line`` takes a line and returns
    whether it was the last one. With ``ends``, a script that succeeds has printed everything.
    """

    def __init__(
        self, node: Node, way: Way, script: Callable[[], str], line: Callable[[str], bool], *, ends: bool = False
    ) -> None:
        self.node = node
        self.said = False  # the user knows that there is no connection
        self.over = threading.Event()
        self.failure: str | None = None  # why it was given up
        self.mistake: Exception | None = None  # a bug in the thread that reads
        self._way, self._script, self._line = way, script, line
        self._ends = ends
        self._away_since: float | None = None  # monotonic
        self._back_at: float | None = None  # when it was connected again, while nothing has come since
        self._lines = 0
        self._heard = time.monotonic()
        self._trying = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Read to the last line."""
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - ``Streams.look`` raises it in the thread that waits for this one
            self.mistake = error
        finally:
            self.over.set()

    def _read(self) -> None:
        tries = 0
        while not self.over.is_set() and not self._closed.is_set():
            before = self._lines
            try:
                remote = self._way[self.node]
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
        """Seconds without a connection; one that breaks at once does not count."""
        now = time.monotonic()
        if self._back_at is not None and now - self._back_at >= SETTLED:
            self._away_since = None
        since = self._away_since
        return 0.0 if since is None else now - since

    def try_out(self) -> None:
        """After a while without a line: test the connection, and break it if it is dead.

        Returns at once; another thread waits for the answer. A machine that is switched off is as silent as a run that
        prints nothing.
        """
        if self._trying or self.over.is_set() or self.away() or time.monotonic() - self._heard < QUIET:
            return
        self._trying = True
        threading.Thread(target=self._ping, name=f"ping-{self.node.name}", daemon=True).start()

    def _ping(self) -> None:
        try:
            remote = self._way[self.node]
            try:
                remote.run("true", deadline=ANSWER)
                self._heard = time.monotonic()
            except RemoteError:
                self._lost()
                remote.close()  # ends the script that is read from, and with it the wait
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
    """The streams of several nodes. ``look`` is to be called about once a second, from one thread."""

    def __init__(self, streams: Sequence[Stream], emit: Emit) -> None:
        self.streams = tuple(streams)
        self._emit = emit

    def start(self) -> None:
        """Start to read from every node."""
        for stream in self.streams:
            threading.Thread(target=stream.run, name=f"follow-{stream.node.name}", daemon=True).start()

    def look(self) -> None:
        """Test quiet connections; report which are lost, and which are back. Raises the error that ended a stream."""
        for stream in self.streams:
            if stream.mistake is not None:
                raise stream.mistake
            stream.try_out()
            name, away = stream.node.name, stream.away()
            if stream.over.is_set():
                continue
            if away >= AWAY and not stream.said:
                stream.said = True
                self._emit(
                    Notice(f"no connection to {name} for {away:.0f} s; the run is still running there", "warning")
                )
            elif stream.said and not away:
                stream.said = False
                self._emit(Notice(f"the connection to {name} is back"))

    def close(self) -> None:
        """Stop reading. The run on the nodes is not affected."""
        for stream in self.streams:
            stream.close()
