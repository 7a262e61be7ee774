"""The one thread of a link: a selector, work posted by other threads, and a tick."""

from __future__ import annotations

import collections
import contextlib
import selectors
import socket
import threading
import time
from typing import Any, Callable, Deque

from link.frames import Connection

TICK = 0.25  # seconds between looks at the clock
HURRY = 0.05  # the same, while somebody is missing


class Loop:
    """Calls handlers of connections, posted work and ``tick`` from one thread, so that they need no locks.

    ``tick(now, late)`` is true when it wants to be called again soon; ``late`` is by how many seconds this thread was
    held up (the process was stopped, the machine slept): silence of others in that time means nothing.

    ``lose(connection, error)`` is called with whatever a connection's handler raises. What ``tick`` and posted work
    raise ends the loop, and ``broken`` is called.
    """

    def __init__(
        self,
        tick: Callable[[float, float], bool],
        lose: Callable[[Connection, Exception], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self._tick = tick
        self._lose = lose
        self._broken = broken
        self._posted: Deque[Callable[[], None]] = collections.deque()
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._running = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._running = True
        self.selector.register(self._ear, selectors.EVENT_READ, self._nudged)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        """Have ``work`` done by the thread, soon and in order."""
        self._posted.append(work)
        with contextlib.suppress(OSError):  # it is full: the thread is about to look; or the loop has ended
            self._mouth.send(b"\0")

    def stop(self, patience: float) -> None:
        """End the thread after what was posted."""
        self.post(self._end)
        if self._thread.ident is None:
            self._close()
        else:
            self._thread.join(patience)

    def watch(self, connection: Connection, handler: Callable[[int], None]) -> None:
        """Call ``handler(events)`` when the connection can be read or, while it has something to write, written.

        The handler stays the first one until the connection is forgotten.
        """
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.waiting else 0)
        key = self.selector.get_map().get(connection.fileno())
        if key is None:
            self.selector.register(connection, events, handler)
        elif key.events != events:
            self.selector.modify(connection, events, key.data)

    def forget(self, connection: Any) -> None:
        """Watch it no longer."""
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(connection)

    def _nudged(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass

    def _end(self) -> None:
        self._running = False

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        try:
            key.data(events)
        except Exception as error:
            if not isinstance(key.fileobj, Connection):
                raise
            self._lose(key.fileobj, error)

    def _run(self) -> None:
        try:
            due = time.monotonic()
            while self._running:
                for key, events in self.selector.select(max(0.0, due - time.monotonic())):
                    # An earlier handler of this round may have closed it.
                    if self.selector.get_map().get(key.fd) is key:
                        self._handle(key, events)
                while self._posted:
                    self._posted.popleft()()
                now = time.monotonic()
                if now >= due:
                    due = now + (HURRY if self._tick(now, max(0.0, now - due - 1.0)) else TICK)
        except Exception as error:  # noqa: BLE001 - a link that has broken must be known, whatever broke it
            self._broken(error)
        finally:
            self._close()

    def _close(self) -> None:
        for sock in (self._ear, self._mouth):
            sock.close()
        self.selector.close()
