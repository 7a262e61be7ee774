"""A script on a node that exchanges lines with this machine while it runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError

if TYPE_CHECKING:
    from provision.model import Node, Remote, Result


class Conversation(threading.Thread):
    """One script, in its own thread until ``close`` ends its input.

    Attributes:
        lines: the lines that the script has printed.
        result: the script's result; None while it runs.
        failure: why it could not run, or was interrupted.
        received_at: when the last line of ``wait_for`` arrived, in monotonic seconds.
    """

    def __init__(
        self,
        node: Node,
        connect: Callable[[Node], Remote],
        script: str,
        *,
        deadline: float | None = None,
        beat: float | None = None,
    ) -> None:
        """After ``beat`` seconds without a line to send, an empty one is sent as a heartbeat."""
        super().__init__(name=f"conversation-{node.name}", daemon=True)
        self.node = node
        self.lines: list[str] = []
        self.result: Result | None = None
        self.failure: ClusterctlError | None = None
        self.received_at = 0.0
        self._connect, self._script, self._deadline, self._beat = connect, script, deadline, beat
        self._received: queue.SimpleQueue[tuple[str | None, float]] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Run the script until ``close``."""
        try:
            remote = self._connect(self.node)
            self.result = remote.run(self._script, stdin=self._input(), on_line=self.receive, deadline=self._deadline)
        except ClusterctlError as error:
            self.failure = error
        finally:
            self._received.put((None, time.monotonic()))

    def send(self, text: str) -> None:
        """Send a line."""
        self._to_send.put(text)

    def receive(self, text: str) -> None:
        """Store a line of the script."""
        self.lines.append(text)
        self._received.put((text, time.monotonic()))

    def wait_for(self, start: str, seconds: float) -> str | None:
        """The next line that starts with ``start``; None if none comes in time, or the script ends first."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            try:
                text, at = self._received.get(timeout=left)
            except queue.Empty:
                return None
            if text is None:
                self._received.put((None, at))  # for the next call
                return None
            if text.startswith(start):
                self.received_at = at
                return text
        return None

    def close(self) -> None:
        """End the script's input, which ends the script."""
        self._to_send.put(None)

    def _input(self) -> Iterator[bytes]:
        while True:
            try:
                text = self._to_send.get(timeout=self._beat)
            except queue.Empty:
                text = ""
            if text is None:
                return
            yield f"{text}\n".encode()


@contextmanager
def run_conversations(conversations: Iterable[Conversation], *, patience: float = 10.0) -> Iterator[None]:
    """Run conversations during the block, then close them and wait ``patience`` seconds for each."""
    started = tuple(conversations)
    try:
        for each in started:
            each.start()
        yield
    finally:
        for each in started:
            each.close()
        for each in started:
            with suppress(RuntimeError):  # never started
                each.join(patience)
