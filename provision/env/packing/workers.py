"""Compress chunks on all processors.

zstd and sha256 release Python's lock, so threads compress the ranges of large files. Groups of small files need much
Python code and are compressed by processes: each runs this interpreter with this program's ``sys.path``, reads groups
from stdin, writes chunks to stdout, and exits at the end of stdin, so also when its parent is killed.

A message is two lengths and two byte strings: a marshalled group (pickle is much slower for many small objects), or a
pickled chunk and the chunk's data.
"""

from __future__ import annotations

import fcntl
import gc
import marshal
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from provision.env.packing.chunks import Compressor, Group, PackedChunk, Range
from provision.env.packing.detect import PrefixDetector
from provision.env.source.files import Source
from provision.errors import ClusterctlError, UsageError

MOST = 8  # processes; each takes some 60 MB, and one process writes the bundle
PREFETCHED = 12  # tasks; their chunks are in memory until it is their turn

_ENOUGH = 16 << 20  # bytes of files; for fewer, starting processes takes longer than it saves
_OVERHEAD = 1 << 16  # bytes that a task counts in addition to its files
_PIPE = 1 << 20  # bytes; the largest pipe that Linux allows by default
_LENGTHS = struct.Struct("=QQ")

Task = Group | Range


@dataclass
class _Worker:
    """A process for groups, and a compressor for ranges that works in this process."""

    process: subprocess.Popen[bytes]
    detector: bytes = b""  # sent with the next group
    compressor: Compressor = field(default_factory=Compressor)


class Workers:
    """Compresses chunks; a context manager that ends its processes. Without processes it works in the calling thread.

    Args:
        limit: bytes of a task's files at most.
        processes: how many to start; None for one per processor.
    """

    def __init__(self, limit: int, processes: int | None = None) -> None:
        self._limit = limit
        self._number = min(len(os.sched_getaffinity(0)), MOST) if processes is None else processes
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads: ThreadPoolExecutor | None = None
        self._compressor = Compressor()
        self._prefetched: dict[Range, Callable[[], PackedChunk]] = {}

    def start(self, size: int) -> None:
        """Start the processes if ``size`` bytes of files are worth it and they are not running yet."""
        if self._workers or not self._number or size <= _ENOUGH:
            return
        # The parent handles Ctrl-C and ends the processes. They inherit a blocked SIGINT, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self._number):
                self._workers.append(_Worker(_start_process()))
                self._idle.put(self._workers[-1])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._threads = ThreadPoolExecutor(self._number)

    def use_detector(self, detector: PrefixDetector) -> None:
        """Set what groups are searched for. Ranges can be compressed before."""
        self._compressor.detector = detector
        pickled = pickle.dumps(detector)
        for worker in self._workers:
            worker.detector = pickled

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the processes."""
        return tuple(worker.process.pid for worker in self._workers)

    def __enter__(self) -> Workers:  # noqa: PYI034 - Self is new in Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if error is not None:
                worker.process.kill()
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            with suppress(BrokenPipeError), worker.process:  # it was killed with a message half written
                pass

    def prefetch(self, ranges: Iterable[Range]) -> None:
        """Start to compress ranges that ``compress`` will receive later, if at all. Only a few: memory is limited."""
        for part in ranges:
            if not self._threads or len(self._prefetched) == PREFETCHED:
                return
            self._prefetched[part] = self._submit(part)

    def compress(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, PackedChunk]]:
        """Compress tasks side by side, and yield them with their chunks in the order of the tasks.

        Raises:
            BundleError: a file changed since the survey.
            UsageError: a file cannot be read, or a process was killed.
        """
        waiting: deque[tuple[Task, Callable[[], PackedChunk]]] = deque()
        room = max(1, 2 * len(self._workers)) * (self._limit + _OVERHEAD)
        used = 0
        for task in tasks:
            size = task.size + _OVERHEAD
            while waiting and used + size > room:
                used -= waiting[0][0].size + _OVERHEAD
                yield _wait_for(*waiting.popleft())
            prefetched = self._prefetched.pop(task, None) if isinstance(task, Range) else None
            waiting.append((task, prefetched or self._submit(task)))
            used += size
        while waiting:
            yield _wait_for(*waiting.popleft())

    def _submit(self, task: Task) -> Callable[[], PackedChunk]:
        if self._threads:
            return self._threads.submit(self._run, task).result
        if isinstance(task, Range):
            chunk = self._compressor.compress_range(task)
        else:
            chunk = self._compressor.compress_group(task)
        return lambda: chunk

    def _run(self, task: Task) -> PackedChunk:
        worker = self._idle.get()
        try:
            return worker.compressor.compress_range(task) if isinstance(task, Range) else _compress(worker, task)
        finally:
            self._idle.put(worker)


def main() -> None:
    """Run a worker process: read groups from file descriptor 0, write chunks to 1."""
    gc.disable()  # it finds nothing in the many small objects
    compressor = Compressor()
    while True:
        try:
            message, detector = _receive(0)
        except EOFError:
            os._exit(0)  # no need to free memory
        if detector:
            compressor.detector = pickle.loads(detector)  # noqa: S301 - from the parent
        package, rows, span, size, verbatim = marshal.loads(message)  # noqa: S302 - from the parent
        group = Group(package, tuple(map(Source._make, rows)), span, size, verbatim)
        try:
            chunk = compressor.compress_group(group)
        except (ClusterctlError, OSError) as error:
            _send(1, pickle.dumps(error), b"")
        else:
            _send(1, pickle.dumps(replace(chunk, data=b"")), chunk.data)


def _wait_for(task: Task, result: Callable[[], PackedChunk]) -> tuple[Task, PackedChunk]:
    return task, result()


def _start_process() -> subprocess.Popen[bytes]:
    program = f"import sys; sys.path[:] = {sys.path!r}; from provision.env.packing.workers import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    with suppress(OSError):  # a user with many pipes may not enlarge this one, which would only save time
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE)
    return process


def _compress(worker: _Worker, group: Group) -> PackedChunk:
    """Have a process compress a group.

    Raises:
        ClusterctlError, OSError: the process reports it, or was killed.
    """
    stdin, stdout = worker.process.stdin, worker.process.stdout
    assert stdin is not None
    assert stdout is not None
    rows = list(map(tuple, group.sources))
    message = marshal.dumps((group.package, rows, group.span, group.size, group.verbatim))
    detector, worker.detector = worker.detector, b""
    try:
        _send(stdin.fileno(), message, detector)
        pickled, data = _receive(stdout.fileno())
    except (BrokenPipeError, EOFError) as error:
        raise UsageError(
            f"the process that packed {group.sources[0].file} was killed", hint="check that enough memory is free"
        ) from error
    answer = pickle.loads(pickled)  # noqa: S301 - from a child process
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, PackedChunk)
    return replace(answer, data=data)


def _send(descriptor: int, first: bytes, second: bytes | bytearray) -> None:
    for part in (_LENGTHS.pack(len(first), len(second)) + first, second):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


def _receive(descriptor: int) -> tuple[bytearray, bytearray]:
    first, second = _LENGTHS.unpack(_read_exactly(descriptor, _LENGTHS.size))
    return _read_exactly(descriptor, first), _read_exactly(descriptor, second)


def _read_exactly(descriptor: int, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.readv(descriptor, [view])
        if not count:
            raise EOFError
        view = view[count:]
    return data
