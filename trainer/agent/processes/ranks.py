"""Finds the ranks among the processes of a run, and reads their activity from /proc.

A rank's main process is the first one with ``RANK``: the workers of its DataLoader inherit it. If no process has one,
as in a plain script on one GPU, the command itself is the only rank.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Dict, Optional, Set, Tuple

from .proc import Stat, environment_of, read, stat_of

YOUNG = 30.0  # seconds in which a process may still become another program, with another environment


class Proc:
    """Reads /proc. ``first_rank`` is the global rank of local rank 0."""

    def __init__(self, first_rank: int = 0) -> None:
        self._first = first_rank
        self._ranks: Dict[Tuple[int, str], Tuple[Optional[int], float]] = {}  # rank, and when it was first looked up

    def stat(self, pid: int) -> Optional[Stat]:
        """The current state of a process, also of a zombie."""
        return stat_of(pid)

    def rank(self, pid: int, stat: Stat) -> Optional[int]:
        """The global rank in a process's environment, or None. Read only once, except for young processes."""
        now = time.monotonic()
        rank, since = self._ranks.get((pid, stat.start), (None, now))
        if rank is None and now - since < YOUNG:
            rank = rank_in(environment_of(pid), self._first)
            self._ranks[pid, stat.start] = (rank, since)
        return rank

    def forget(self, members: Dict[int, Stat]) -> None:
        """Forget all other processes."""
        alive = {(pid, stat.start) for pid, stat in members.items()}
        self._ranks = {key: value for key, value in self._ranks.items() if key in alive}

    def bytes_moved(self, pid: int) -> int:
        """Bytes that a process has read and written so far; 0 if that may not be read.

        proc(5), /proc/PID/io: ``rchar`` and ``wchar`` count every read and write, also of a page cache or a network
        file system; ``read_bytes`` and ``write_bytes`` what went to a disk, also through a mapped file.
        """
        total = 0
        for line in read("/proc/%d/io" % pid).splitlines():
            name, _, value = line.partition(b": ")
            if name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"):
                total += int(value)
        return total

    def wchan(self, pid: int) -> str:
        """The kernel function in which a process waits; empty if unknown."""
        name = read("/proc/%d/wchan" % pid).decode("ascii", "replace").strip()
        return "" if name == "0" else name


def rank_in(environment: Dict[str, str], first_rank: int) -> Optional[int]:
    """The global rank in an environment."""
    rank, local = environment.get("RANK", ""), environment.get("LOCAL_RANK", "")
    if rank.isdigit():
        return int(rank)
    return first_rank + int(local) if local.isdigit() else None


def of_ranks(members: Dict[int, Stat], rank: Callable[[int, Stat], Optional[int]]) -> Dict[int, int]:
    """``{pid: rank}`` of all processes of ranks, including workers of DataLoaders."""
    found = ((pid, rank(pid, stat)) for pid, stat in members.items())
    return {pid: number for pid, number in found if number is not None}


def main_processes(
    members: Dict[int, Stat], ranks: Dict[int, int], first_rank: Optional[int], known: Set[Tuple[int, str]]
) -> Dict[int, int]:
    """``{rank: pid}`` of the ranks' main processes.

    Args:
        members: The living processes of the run.
        ranks: The result of ``of_ranks`` for them.
        first_rank: The rank of the command itself if no process has one; None: it has none.
        known: Pids and start times of processes that were seen below a rank: a DataLoader's worker that outlives its
        rank
            is not the rank.
    """
    found: Dict[int, int] = {}
    for pid in sorted(ranks, key=lambda pid: (int(members[pid].start), pid)):
        if members[pid].parent not in ranks and (pid, members[pid].start) not in known:
            found.setdefault(ranks[pid], pid)
    if not ranks and first_rank is not None:
        commands = [pid for pid, stat in members.items() if stat.parent == os.getpid()]
        found = {first_rank: min(commands, key=lambda pid: int(members[pid].start))} if commands else {}
    return found
