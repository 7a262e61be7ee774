"""A stream of lines from every node, for as long as there is something to come: broken connections are made again.

What goes on is on the nodes; a connection only shows it. So a connection that breaks is said once, when it has been
away for a while, and tried again until it is back or nobody needs it any more.
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
AWAY = 10.0  # seconds without a connection until that is said
QUIET = 10.0  # seconds without a line until the connection is tried out
ANSWER = 10.0  # seconds that a connection has to show that it lives
SETTLED = 2.0  # seconds that a connection must have held to count as one, where nothing comes
TRIES = 3  # scripts that end by themselves and say nothing, until a node is given up


class Way(Protocol):
    """``ssh.remote.Connections``, as far as it is needed here."""

    def __getitem__(self, node: Node) -> Remote:
        """The connection to a node, made anew where it broke."""
        ...


class Stream:
    """What one node has to tell. ``run`` is for a thread of its own.

    ``script`` gives the script that tells everything from the present offset on; ``line`` takes a line and tells
    whether it was the last one. With ``ends`` a script that ends well has told everything.
    """

    def __init__(
        self, node: Node, way: Way, script: Callable[[], str], line: Callable[[str], bool], *, ends: bool = False
    ) -> None:
        self.node = node
        self.said = False  # that there is none
        self.over = threading.Event()
        self.failure: str | None = None  # why it was given up
        self.mistake: Exception | None = None  # of ours, in the thread that reads
        self._way, self._script, self._line = way, script, line
        self._ends = ends
        self._away_since: float | None = None  # monotonic
        self._back_at: float | None = None  # when it was connected again, while nothing has come since
        self._lines = 0
        self._heard = time.monotonic()
        self._trying = False
        self._closed = threading.Event()

    def run(self) -> None:
        """Read to the last line, over as many connections as it takes."""
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
        """Try no more."""
        self._closed.set()

    def away(self) -> float:
        """Seconds without a connection; one that breaks as soon as it is made is none."""
        now = time.monotonic()
        if self._back_at is not None and now - self._back_at >= SETTLED:
            self._away_since = None
        since = self._away_since
        return 0.0 if since is None else now - since

    def try_out(self) -> None:
        """Where no line has come for a while: find out whether the connection lives, and break it where not.

        At once: the answer is waited for elsewhere. A machine that is switched off says nothing, and its silence looks
        like that of a run that has nothing to tell.
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
        """Begin to read from every node."""
        for stream in self.streams:
            threading.Thread(target=stream.run, name=f"follow-{stream.node.name}", daemon=True).start()

    def look(self) -> None:
        """Try out quiet connections; say which are away, and which are back. Raises what a stream has died of."""
        for stream in self.streams:
            if stream.mistake is not None:
                raise stream.mistake
            stream.try_out()
            name, away = stream.node.name, stream.away()
            if stream.over.is_set():
                continue
            if away >= AWAY and not stream.said:
                stream.said = True
                self._emit(Notice(f"no connection to {name} for {away:.0f} s; the run goes on there", "warning"))
            elif stream.said and not away:
                stream.said = False
                self._emit(Notice(f"the connection to {name} is back"))

    def close(self) -> None:
        """Read no more. What runs on the nodes is not touched."""
        for stream in self.streams:
            stream.close()
