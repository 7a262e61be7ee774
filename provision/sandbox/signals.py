"""Ctrl-C and SIGTERM while namespaces and mounts are made: as an exception, once, and never during cleaning up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from provision.errors import InterruptedByUser

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], object] | int


@contextmanager
def interruptible() -> Iterator[None]:
    """In this block the first SIGINT, SIGTERM or SIGHUP raises InterruptedByUser and later ones are ignored.

    Python's own SIGTERM would end the process on the spot and leave everything behind. Only the main thread can set
    handlers; elsewhere the block changes nothing.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # what follows is cleaning up
        raise InterruptedByUser(f"interrupted by {signal.Signals(number).name}")

    with _handlers(interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In this block SIGINT, SIGTERM and SIGHUP are ignored: half a cleaning up is worse than a late one."""
    with _handlers(signal.SIG_IGN):
        yield


@contextmanager
def _handlers(handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that was not set from Python, and cannot be put back.
    before = {each: old for each in _SIGNALS if (old := signal.getsignal(each)) is not None}
    try:
        for each, old in before.items():
            if old is not signal.SIG_IGN:  # nohup and the like: who started us wants it ignored
                signal.signal(each, handler)
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
