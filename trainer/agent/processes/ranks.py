"""What /proc says of the processes of a run, and which of them are its ranks.

A rank's main process is the first one that was given ``RANK``: the workers of its DataLoader inherit it. Where no
process carries one, as in a plain script on one GPU, the command itself is the only rank.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Dict, Optional, Set, Tuple

from .proc import Stat, environment_of, read, stat_of

YOUNG = 30.0  # seconds for which a process may still become another program, with another environment


class Proc:
    """Reads /proc. ``first_rank`` is the global rank of local rank 0."""

    def __init__(self, first_rank: int = 0) -> None:
        self._first = first_rank
        self._ranks: Dict[Tuple[int, str], Tuple[Optional[int], float]] = {}  # rank, and when it was first looked for

    def stat(self, pid: int) -> Optional[Stat]:
        """Its state now; also that of a zombie."""
        return stat_of(pid)

    def rank(self, pid: int, stat: Stat) -> Optional[int]:
        """The global rank in its environment; None where it has none. Asked once, but for young processes."""
        now = time.monotonic()
        rank, since = self._ranks.get((pid, stat.start), (None, now))
        if rank is None and now - since < YOUNG:
            rank = rank_in(environment_of(pid), self._first)
            self._ranks[pid, stat.start] = (rank, since)
        return rank

    def forget(self, members: Dict[int, Stat]) -> None:
        """Keep only what is known of these."""
        alive = {(pid, stat.start) for pid, stat in members.items()}
        self._ranks = {key: value for key, value in self._ranks.items() if key in alive}

    def moved(self, pid: int) -> int:
        """Bytes it has read and written so far, from and to anything; 0 where that may not be read.

        proc(5), /proc/PID/io: ``rchar`` and ``wchar`` count every read and write, also of a page cache or a network
        file system; ``read_bytes`` and ``write_bytes`` what went to a disk, also by way of a mapped file.
        """
        total = 0
        for line in read("/proc/%d/io" % pid).splitlines():
            name, _, value = line.partition(b": ")
            if name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"):
                total += int(value)
        return total

    def wchan(self, pid: int) -> str:
        """Where in the kernel it waits; empty where the kernel does not say."""
        name = read("/proc/%d/wchan" % pid).decode("ascii", "replace").strip()
        return "" if name == "0" else name


def rank_in(environment: Dict[str, str], first_rank: int) -> Optional[int]:
    """The global rank that an environment gives."""
    rank, local = environment.get("RANK", ""), environment.get("LOCAL_RANK", "")
    if rank.isdigit():
        return int(rank)
    return first_rank + int(local) if local.isdigit() else None


def of_ranks(members: Dict[int, Stat], rank: Callable[[int, Stat], Optional[int]]) -> Dict[int, int]:
    """``{pid: rank}`` of all processes that belong to a rank, workers of DataLoaders too."""
    found = ((pid, rank(pid, stat)) for pid, stat in members.items())
    return {pid: number for pid, number in found if number is not None}


def mains(
    members: Dict[int, Stat], ranks: Dict[int, int], first_rank: Optional[int], known: Set[Tuple[int, str]]
) -> Dict[int, int]:
    """``{rank: pid}`` of the ranks' main processes.

    Args:
        members: The living processes of the run.
        ranks: What ``of_ranks`` says of them.
        first_rank: The rank of the command itself where no process carries one; None: it has none.
        known: Pids and start times of processes that were seen below a rank: a DataLoader's worker that has
            outlived its rank is not the rank.
    """
    found: Dict[int, int] = {}
    for pid in sorted(ranks, key=lambda pid: (int(members[pid].start), pid)):
        if members[pid].parent not in ranks and (pid, members[pid].start) not in known:
            found.setdefault(ranks[pid], pid)
    if not ranks and first_rank is not None:
        commands = [pid for pid, stat in members.items() if stat.parent == os.getpid()]
        found = {first_rank: min(commands, key=lambda pid: int(members[pid].start))} if commands else {}
    return found
