"""Seal chunks on all processors, in processes of our own.

Threads would wait for one another between the many small files. A worker is this interpreter with this program's
``sys.path``; it reads messages on stdin, answers on stdout, and ends when stdin does, so also when its parent is
killed. What it has compressed it keeps until it is told where in the bundle that goes, and writes it there itself.

A message is its length and a marshalled value: pickle takes much longer for many small objects. Answers are pickled.
"""

from __future__ import annotations

import gc
import marshal
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from provision.env.packing import output
from provision.env.packing.chunks import Part
from provision.env.packing.marks import Seeking
from provision.env.packing.output import Piece
from provision.env.packing.seal import Sealed, Sealer
from provision.env.source.scan import Found
from provision.errors import ClusterctlError, UsageError

_LENGTH = struct.Struct("=Q")

Place = Callable[[Sequence[Piece]], None]
"""Say where the bytes of a chunk go."""


@dataclass(frozen=True)
class Range:
    """A range of a large file, which becomes one raw chunk."""

    found: Found
    offset: int
    size: int


def ranges_of(found: Found, limit: int) -> list[Range]:
    """The ranges of a large file."""
    return [Range(found, begin, min(limit, found.size - begin)) for begin in range(0, found.size, limit)]


Task = Part | Range


@dataclass
class _Worker:
    """A process, and what it is told with its next task: what to seek, and where to write chunks, by number."""

    process: subprocess.Popen[bytes]
    seeking: bytes = b""
    orders: list[tuple[int, Sequence[Piece]]] = field(default_factory=list)


def processors() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


class Workers:
    """A pool of worker processes; a context manager that ends them. With none, tasks are done where they are given."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._threads: ThreadPoolExecutor | None = None
        self._sealer = Sealer()
        self._number = 0

    def start(self, number: int) -> None:
        """Start the processes; they are started once only."""
        if self._all or not number:
            return
        # Ctrl-C reaches the parent, who ends them: they inherit that SIGINT is blocked, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(number):
                self._all.append(_start())
                self._free.put(self._all[-1])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._threads = ThreadPoolExecutor(number)

    def seek(self, seeking: Seeking) -> None:
        """Tell what is sought in the files of parts; ranges can be sealed before."""
        self._sealer.seeking = seeking
        pickled = pickle.dumps(seeking)
        for worker in self._all:
            worker.seeking = pickled

    @property
    def number(self) -> int:
        """How many processes there are."""
        return len(self._all)

    def __enter__(self) -> Workers:  # noqa: PYI034 - Self is new in Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            if error is not None:
                worker.process.kill()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            with suppress(BrokenPipeError), worker.process:  # killed with a message half written
                pass

    def submit(self, task: Task) -> Callable[[], tuple[Sealed, Place]]:
        """Start sealing a chunk.

        Returns:
            A function that waits for the chunk. It raises BundleError where a file changed since the survey, UsageError
            where one cannot be read or a worker was killed, and OSError where another chunk could not be written.
        """
        self._number += 1
        if self._threads:
            future: Future[tuple[Sealed, Place]] = self._threads.submit(self._give, task, self._number)
            return future.result
        sealed, data = _do(self._sealer, task)
        return lambda: (sealed, partial(output.place, data))

    def finish(self) -> None:
        """Wait until all chunks are written, and end the processes; errors as for ``submit``."""
        for worker in self._all:
            _tell(worker, None, 0)
        for worker in self._all:
            _hear(worker, "the environment")
            assert worker.process.stdin is not None
            worker.process.stdin.close()

    def _give(self, task: Task, number: int) -> tuple[Sealed, Place]:
        worker = self._free.get()
        try:
            _tell(worker, task, number)
            sealed = _hear(worker, (task.found[0] if isinstance(task, Part) else task.found).source)
        finally:
            self._free.put(worker)
        assert isinstance(sealed, Sealed)
        return sealed, lambda pieces: worker.orders.append((number, pieces))


def main() -> None:
    """What a worker does: messages come on file descriptor 0, answers go to 1."""
    gc.disable()  # it would look through many small objects again and again, and find nothing
    sealer = Sealer()
    held: dict[int, bytes] = {}
    while True:
        try:
            seeking, orders, task, number = marshal.loads(_receive(0))  # noqa: S302 - from our own parent
        except EOFError:
            os._exit(0)  # there is nothing to tidy up, and much to forget
        if seeking:
            sealer.seeking = pickle.loads(seeking)  # noqa: S301 - from our own parent
        answer: Sealed | Exception | None = None
        try:
            for one, pieces in orders:
                output.place(held.pop(one), pieces)
            if task is not None:
                answer, held[number] = _do(sealer, _task(task))
        except (ClusterctlError, OSError) as error:
            answer = error
        _send(1, pickle.dumps(answer))


def _do(sealer: Sealer, task: Task) -> tuple[Sealed, bytes]:
    return sealer.part(task) if isinstance(task, Part) else sealer.range(task.found, task.offset, task.size)


def _plain(task: Task) -> Any:
    """A task in types that marshal knows."""
    if isinstance(task, Part):
        return task.package, [tuple(found) for found in task.found], task.span, task.verbatim
    return tuple(task.found), task.offset, task.size


def _task(plain: Any) -> Task:
    if len(plain) == 3:
        found, offset, size = plain
        return Range(Found._make(found), offset, size)
    package, rows, span, verbatim = plain
    return Part(package, tuple(map(Found._make, rows)), span, verbatim)


def _start() -> _Worker:
    program = f"import sys; sys.path[:] = {sys.path!r}; from provision.env.packing.workers import main; main()"
    command = [sys.executable, "-c", program]
    return _Worker(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))


def _tell(worker: _Worker, task: Task | None, number: int) -> None:
    """Give a worker its next task, and what it must know before."""
    message = worker.seeking, worker.orders, None if task is None else _plain(task), number
    worker.seeking, worker.orders = b"", []
    assert worker.process.stdin is not None
    with suppress(BrokenPipeError):  # it was killed: its answer tells
        _send(worker.process.stdin.fileno(), marshal.dumps(message))


def _hear(worker: _Worker, what: str) -> Sealed | None:
    """A worker's answer.

    Raises:
        ClusterctlError: what went wrong in it, or it was killed when it packed ``what``.
        OSError: it could not write.
    """
    assert worker.process.stdout is not None
    try:
        answer = pickle.loads(_receive(worker.process.stdout.fileno()))  # noqa: S301 - from our own process
    except EOFError as error:
        raise UsageError(f"a process that packed {what} was killed", hint="is there enough free memory?") from error
    if isinstance(answer, Exception):
        raise answer
    assert answer is None or isinstance(answer, Sealed)
    return answer


def _send(descriptor: int, value: bytes) -> None:
    view = memoryview(_LENGTH.pack(len(value)) + value)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(descriptor: int) -> bytes:
    return _take(descriptor, _LENGTH.unpack(_take(descriptor, _LENGTH.size))[0])


def _take(descriptor: int, size: int) -> bytes:
    """Exactly ``size`` bytes."""
    blocks = []
    while size:
        block = os.read(descriptor, min(size, 1 << 16))
        if not block:
            raise EOFError
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)
