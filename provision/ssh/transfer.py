"""One stream of bytes to many nodes at once.

Bulk bytes go through the system's ssh where that works (``bulk``): OpenSSH encrypts in a process of its own, so that
several streams use several cores; paramiko's would share one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.ssh.openssh import OpenSshRemote, bulk, ssh_argv
from provision.ssh.wire import NodeUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from provision.model import Remote, Result

__all__ = ["BLOCKS_AHEAD", "STALL", "OpenSshRemote", "broadcast", "bulk", "ssh_argv"]

BLOCKS_AHEAD = 8  # blocks that wait for one node before the reader waits for it
STALL = 60.0  # seconds without a block taken until a node is left behind


class _Aborted(ClusterctlError):  # noqa: N818 - never leaves this file
    """The stream is broken off; what a lane's run raises then, and nobody sees."""


class _Lane:
    """One node's stream: a short queue, and the thread that runs the script on it."""

    def __init__(self, remote: Remote, changed: threading.Condition) -> None:
        self.remote = remote
        self.blocks: deque[bytes] = deque()
        self.moved = time.monotonic()  # when a block was last taken, or the queue last empty
        self.complete = False
        self.aborted = False
        self.outcome: Result | BaseException | None = None
        self._changed = changed

    def start(self, script: str, deadline: float | None) -> None:
        threading.Thread(target=self._run, args=(script, deadline), daemon=True).start()

    def _run(self, script: str, deadline: float | None) -> None:
        outcome: Result | BaseException
        try:
            outcome = self.remote.run(script, stdin=self._take(), deadline=deadline)
        except BaseException as error:  # noqa: BLE001 - returned or raised by broadcast
            outcome = error
        with self._changed:
            self.outcome = self.outcome or outcome
            self._changed.notify_all()

    def _take(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.blocks or self.complete or self.aborted or self.outcome)
                if self.aborted:
                    raise _Aborted("aborted")
                if not self.blocks:
                    return
                block = self.blocks.popleft()
                self.moved = time.monotonic()
                self._changed.notify_all()
            yield block
            self.moved = time.monotonic()


def broadcast(
    remotes: Mapping[str, Remote],
    script: Mapping[str, str],
    blocks: Iterable[bytes],
    *,
    on_bytes: Callable[[int], None],
    deadline: float | None = None,
    stall: float = STALL,
) -> dict[str, Result | ClusterctlError]:
    """Run a script on every node and give all of them the same bytes, which are read once.

    Memory holds ``BLOCKS_AHEAD`` blocks however many nodes there are, so the slowest node sets the pace; one that
    takes nothing for ``stall`` seconds, or fails, is left behind and stops no other.

    Args:
        remotes: by node name, the way to each node.
        script: by node name, what reads the bytes there.
        blocks: the stream, in blocks of about 1 MiB. An exception that it raises breaks every stream off, stops the
            scripts, and is raised here.
        on_bytes: called with the size of each block once every node's queue has it.
        deadline: seconds for each node's script.
        stall: seconds.

    Returns:
        By node name, how its script ended, or why it did not.
    """
    changed = threading.Condition()
    lanes = {name: _Lane(remote, changed) for name, remote in remotes.items()}
    try:
        for name, lane in lanes.items():
            lane.start(script[name], deadline)
        for block in blocks:
            if block:
                _hand_out(block, lanes, changed, stall)
                on_bytes(len(block))
            if all(lane.outcome for lane in lanes.values()):
                break
        with changed:
            for lane in lanes.values():
                lane.complete = True
            changed.notify_all()
            while waiting := [lane for lane in lanes.values() if not lane.outcome]:
                changed.wait(_leave_behind([lane for lane in waiting if lane.blocks], stall))
    except BaseException:
        _abort(lanes, changed)
        raise
    results: dict[str, Result | ClusterctlError] = {}
    for name, lane in lanes.items():
        assert lane.outcome is not None
        if isinstance(lane.outcome, BaseException) and not isinstance(lane.outcome, ClusterctlError):
            raise lane.outcome
        results[name] = lane.outcome
    return results


def _hand_out(block: bytes, lanes: Mapping[str, _Lane], changed: threading.Condition, stall: float) -> None:
    """Append ``block`` to every queue, as soon as there is room in each."""
    with changed:
        todo = list(lanes.values())
        while True:
            full = []
            for lane in todo:
                if lane.outcome:
                    continue
                if len(lane.blocks) < BLOCKS_AHEAD:
                    if not lane.blocks:
                        lane.moved = time.monotonic()
                    lane.blocks.append(block)
                else:
                    full.append(lane)
            changed.notify_all()
            if not full:
                return
            todo = full
            changed.wait(_leave_behind(full, stall))


def _leave_behind(waiting: list[_Lane], stall: float) -> float | None:
    """Give up the lanes that have stood still for ``stall`` seconds; the seconds until the next one would have."""
    now = time.monotonic()
    for lane in waiting:
        if lane.outcome is None and now - lane.moved >= stall:
            lane.outcome = NodeUnreachable(lane.remote.node, f"took no data for {stall:g} s, left behind")
            lane.aborted = True
            threading.Thread(target=lane.remote.close, daemon=True).start()
    left = [stall - (now - lane.moved) for lane in waiting if lane.outcome is None]
    return max(0.0, min(left)) if left else (0.0 if waiting else None)


def _abort(lanes: Mapping[str, _Lane], changed: threading.Condition) -> None:
    """Break every stream off, and wait until it is."""
    with changed:
        for lane in lanes.values():
            lane.aborted = True
        changed.notify_all()
        changed.wait_for(lambda: all(lane.outcome for lane in lanes.values()), timeout=5)
        stuck = [lane for lane in lanes.values() if not lane.outcome]
    closers = [threading.Thread(target=lane.remote.close, daemon=True) for lane in stuck]
    for closer in closers:  # in the middle of a block that nobody takes
        closer.start()
    for closer in closers:
        closer.join(5)
