"""Give tasks to workers, and do what follows in the order in which they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from provision.env.packing.seal import Sealed
from provision.env.packing.workers import Place, Task, Workers

_EACH = 1 << 16  # bytes that a task counts beside its files'
_EARLY = 12  # tasks that may begin before their turn: what comes of them stays in memory until then


class Pipeline:
    """Tasks that are being done, or are done and have not been taken yet.

    Args:
        workers: who does them.
        limit: bytes of a task's files at most.
    """

    def __init__(self, workers: Workers, limit: int) -> None:
        self._workers = workers
        self._limit = limit
        self._held = 0
        self._early: dict[Task, Callable[[], tuple[Sealed, Place]]] = {}
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def begin(self, tasks: Iterable[Task]) -> None:
        """Begin some tasks that will be added later, or not at all."""
        for task in tasks:
            if len(self._early) >= _EARLY:
                return
            self._early[task] = self._workers.submit(task)

    def add(self, task: Task, keep: Callable[[Sealed, Place], None]) -> None:
        """Have a chunk sealed, and then ``keep`` it.

        Raises:
            BundleError: a file of an earlier task changed since the survey.
            UsageError: one cannot be read, or a worker was killed.
            OSError: a chunk cannot be written.
        """
        size = task.size + _EACH
        while self._waiting and self._held + size > self._room:
            self._take()
        result = self._early.pop(task, None) or self._workers.submit(task)
        self._held += size
        self._waiting.append((size, lambda: keep(*result())))

    def then(self, action: Callable[[], None]) -> None:
        """Do something when all that was added before has been kept."""
        self._waiting.append((0, action))

    def finish(self) -> None:
        """Wait until everything is kept and written; errors as for ``add``."""
        while self._waiting:
            self._take()
        self._workers.finish()

    @property
    def _room(self) -> int:
        """Bytes of files that tasks may hold at once; one task may hold more."""
        return (2 + 2 * self._workers.number) * (self._limit + _EACH)

    def _take(self) -> None:
        size, action = self._waiting.popleft()
        action()
        self._held -= size
