"""Seal parts on all processors, in processes of our own.

Threads would wait for one another between the many small files. A worker is this interpreter with this program's
``sys.path``; it reads pickled parts on stdin, answers on stdout, and ends when stdin does, so also when its parent is
killed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import IO

from provision.env.chunks import Part
from provision.env.marks import Seeking
from provision.env.seal import Sealed, seal
from provision.errors import ClusterctlError, UsageError

_IN_FLIGHT = 192 << 20  # bytes of files being compressed, or compressed and not yet written

_Worker = subprocess.Popen[bytes]


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """A pool of worker processes; a context manager that ends them."""

    def __init__(self, seeking: Seeking, number: int) -> None:
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_start(seeking) for _ in range(number)]
        for worker in self._all:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(number)

    def __enter__(self) -> Workers:  # noqa: PYI034 - Self is new in Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            if error is not None:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            with suppress(BrokenPipeError), worker:  # killed with a question half written
                pass

    def seal(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Sealed]]:
        """Start sealing parts; they come in their order, and only so many at once as memory may hold.

        Raises:
            BundleError: a file changed since the survey.
            UsageError: a file cannot be read, or a worker was killed.
        """
        left = deque(parts)
        waiting: deque[tuple[Part, Future[Sealed]]] = deque()
        self._fill(waiting, left)
        return self._results(waiting, left)

    def _fill(self, waiting: deque[tuple[Part, Future[Sealed]]], left: deque[Part]) -> None:
        held = sum(part.size for part, _ in waiting)
        while left and (not waiting or held + left[0].size <= _IN_FLIGHT):
            part = left.popleft()
            held += part.size
            waiting.append((part, self._threads.submit(self._ask, part)))

    def _results(self, waiting: deque[tuple[Part, Future[Sealed]]], left: deque[Part]) -> Iterator[tuple[Part, Sealed]]:
        while waiting:
            part, future = waiting.popleft()
            yield part, future.result()
            self._fill(waiting, left)

    def _ask(self, part: Part) -> Sealed:
        worker = self._free.get()
        try:
            _send(worker.stdin, part)
            assert worker.stdout is not None
            answer = pickle.load(worker.stdout)  # noqa: S301 - from our own process
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UsageError(
                f"a process that packed {part.found[0].source} was killed", hint="is there enough free memory?"
            ) from error
        finally:
            self._free.put(worker)
        if isinstance(answer, ClusterctlError):
            raise answer
        assert isinstance(answer, Sealed)
        return answer


def main() -> None:
    """What a worker does: its questions come on file descriptor 0, its answers go to 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, who ends us
    with open(0, "rb") as questions, open(1, "wb") as answers:
        seeking = pickle.load(questions)  # noqa: S301 - from our own parent
        while True:
            try:
                part = pickle.load(questions)  # noqa: S301
            except EOFError:
                return
            try:
                answer: Sealed | ClusterctlError = seal(part, seeking)
            except ClusterctlError as error:
                answer = error
            _send(answers, answer)


def _start(seeking: Seeking) -> _Worker:
    program = f"import sys; sys.path[:] = {sys.path!r}; from provision.env.workers import main; main()"
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with suppress(BrokenPipeError):  # it ended already: the first question finds out
        _send(worker.stdin, seeking)
    return worker


def _send(stream: IO[bytes] | None, value: object) -> None:
    assert stream is not None
    pickle.dump(value, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()
