"""A function on several cores: results in order, with a bounded number of items in memory."""

from __future__ import annotations

import os
import signal
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Callable, Deque, Iterable, Iterator, Sequence, Tuple

from trainer.lm.errors import FailedError

LARGE = 16 << 20  # bytes of text from which starting more processes pays off
AHEAD = 3  # items in memory per process

_function: Any = None  # set in a worker process


def _start(make: Callable[..., Any], arguments: Sequence[Any]) -> None:
    global _function  # noqa: PLW0603 - a pool's process keeps its function here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process handles Ctrl-C and stops the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core already
    _function = make(*arguments)


def _call(item: Any) -> Any:
    return _function(item)


def count_for(requested: int, size: int) -> int:
    """Return the number of processes for ``size`` bytes of text. ``requested`` is 0 for an automatic choice."""
    return requested or (len(os.sched_getaffinity(0)) if size >= LARGE else 1)


def mapped(
    make: Callable[..., Any], arguments: Sequence[Any], items: Iterable[Tuple[Any, Any]], workers: int
) -> Iterator[Tuple[Any, Any]]:
    """Call ``make(*arguments)`` in each process, and the function that it returns on each item.

    An item comes with a tag; yield the tag and the result, in order.

    Raises:
        FailedError: a process was killed.
    """
    if workers == 1:
        function = make(*arguments)
        for tag, item in items:
            yield tag, function(item)
        return
    start = (make, arguments)
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start, initargs=start)
    waiting: Deque[Tuple[Any, Future[Any]]] = deque()
    try:
        for tag, item in items:
            waiting.append((tag, pool.submit(_call, item)))
            if len(waiting) >= AHEAD * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise FailedError("an encoding process was killed", "--workers 1 needs the least memory") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
