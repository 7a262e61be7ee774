"""Runs a function for many nodes at once.

Python runs one thread at a time. Where it may use many cores, the threads of many connections keep waking each other on
other cores, which costs more than their work: 1,000 nodes took 16 s on 16 cores, 12.5 s on two and 10 s on one
(docs/scale.md). So the threads for many nodes stay on two cores, which leaves the kernel a choice if one is busy. The
programs that they start use all cores again.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from provision.errors import ClusterctlError, InterruptedByUser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from provision.model import Node

T = TypeVar("T")

MANY = 128  # nodes, from which the threads stay on two cores


def fan_out(nodes: Iterable[Node], work: Callable[[Node], T], *, limit: int = 32) -> dict[str, T | ClusterctlError]:
    """Call ``work`` for every node, at most ``limit`` at a time; a node that fails does not stop the others.

    Returns:
        By node name, in the order of ``nodes``: the result of ``work``, or the ClusterctlError that it raised.

    Raises:
        InterruptedByUser: Ctrl-C. Raised at once; running calls end when their connections are closed.
        Exception: any other error of ``work``, which is a bug; raised when all nodes are finished.
    """
    todo: queue.SimpleQueue[Node] = queue.SimpleQueue()
    nodes = tuple({node.name: node for node in nodes}.values())
    for node in nodes:
        todo.put(node)
    done: queue.SimpleQueue[tuple[str, T | BaseException]] = queue.SimpleQueue()
    stopped = threading.Event()
    cores = _two_cores() if len(nodes) >= MANY else None

    def worker() -> None:
        if cores:
            _stay_on(cores)
        while not stopped.is_set():
            try:
                node = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((node.name, work(node)))
            except BaseException as error:  # noqa: BLE001 - the waiting caller raises or returns it
                done.put((node.name, error))

    outcomes: dict[str, T | BaseException] = {}
    try:
        # Daemon threads: an executor would wait for its threads when the program ends.
        for number in range(min(limit, len(nodes))):
            threading.Thread(target=worker, name=f"node-{number}", daemon=True).start()
        while len(outcomes) < len(nodes):
            name, outcome = done.get()
            outcomes[name] = outcome
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted", hint="run the same command again") from None
    finally:
        stopped.set()
    return {node.name: _value(outcomes[node.name]) for node in nodes}


@contextmanager
def all_cores() -> Iterator[None]:
    """Let a program that is started in this block use every core that this program may use."""
    before = os.sched_getaffinity(0)
    _stay_on(os.sched_getaffinity(os.getpid()))  # the main thread's, which never changes
    try:
        yield
    finally:
        _stay_on(before)


def _two_cores() -> set[int]:
    cores = sorted(os.sched_getaffinity(os.getpid()))
    first = os.getpid() % len(cores)  # several commands at once choose others
    return {cores[first], cores[(first + 1) % len(cores)]}


def _stay_on(cores: set[int]) -> None:
    """Keep this thread, and threads and programs that it starts, on these cores."""
    with suppress(OSError):  # a container may forbid it: only speed is lost
        os.sched_setaffinity(0, cores)


def _value(outcome: T | BaseException) -> T | ClusterctlError:
    """A result or a node's error is returned; any other exception is raised."""
    if isinstance(outcome, ClusterctlError) and not isinstance(outcome, InterruptedByUser):
        return outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
