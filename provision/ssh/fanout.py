"""Runs a function for many nodes at once."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeVar

from provision.errors import ClusterctlError, InterruptedByUser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from provision.model import Node

T = TypeVar("T")


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

    def worker() -> None:
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


def _value(outcome: T | BaseException) -> T | ClusterctlError:
    """A result or a node's error is returned; any other exception is raised."""
    if isinstance(outcome, ClusterctlError) and not isinstance(outcome, InterruptedByUser):
        return outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
