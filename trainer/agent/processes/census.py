"""The run's processes, looked at again and again at little cost, and which of them are ranks.

A walk through all of /proc costs tens of milliseconds on a large machine. So what was once seen to be somebody
else's is not read again, and the next look waits the longer the more the last one cost. What must be exact (nothing
is left) is asked of ``processes.members``.
"""

from __future__ import annotations

import os
import selectors
import time
from typing import Dict, List, NamedTuple, Optional, Set

from processes.cgroup import Group
from processes.proc import Stat, environment_of, marked, members, open_pidfd, pids, spared, stat_of

LOOK = 2.0  # seconds between looks, at least
RARELY = 10.0  # and at most
SHARE = 0.003  # of one core that looking may take


class Death(NamedTuple):
    """A rank's process that has ended; ``status`` is its wait status, None when its parent was faster than we."""

    rank: int
    pid: int
    status: Optional[int]


class Census:
    """What is known of a run's processes on this node."""

    def __init__(self, run: str, node: str, group: Optional[Group] = None, adopter: Optional[int] = None) -> None:
        self.started: Set[int] = set()  # running children of this process, with all that descends from them
        self.adopter = adopter  # the guard, while it lives
        self.known: Dict[int, Stat] = {}
        self.ranks: Dict[int, int] = {}  # pid: global rank
        self._run, self._node = run, node
        self._group = group or Group(run, node)
        self._young: Set[int] = set()  # seen for the first time in the last look: may yet become another program
        self._strangers: Set[int] = set()
        self._blank: Set[int] = set()  # showed no environment: a stranger's, or in the midst of an exec
        self._handles: Dict[int, int] = {}  # pid of a rank: pidfd
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time for another look."""
        return now >= self._due

    def look(self) -> Dict[int, Stat]:
        """The living processes of the run; reads only what is new and what is known to be ours."""
        began = time.thread_time()  # on a busy machine a look takes long and costs no more
        present = pids()
        self._strangers &= present
        self._blank &= present
        fresh: Dict[int, Stat] = {}
        alive: Dict[int, Stat] = {}
        for pid in present - self._strangers:
            stat = stat_of(pid)
            if stat is None or stat.state in "ZX":
                continue
            if pid in self.known and self.known[pid].start == stat.start:
                alive[pid] = stat
            else:
                fresh[pid] = stat
        for pid in self._young & alive.keys():
            self._see(pid, alive[pid], environment_of(pid))
        found = self._ours(fresh, alive)
        self._young = set(found)
        alive.update(found)
        self.known = alive
        cost = time.thread_time() - began
        self._due = time.monotonic() + min(RARELY, max(LOOK, cost / SHARE))
        return alive

    def _ours(self, fresh: Dict[int, Stat], alive: Dict[int, Stat]) -> Dict[int, Stat]:
        """Those of the new processes that belong to the run."""
        above = spared()
        grouped = set(self._group.pids())
        found: Dict[int, Stat] = {}
        for pid in sorted(fresh):  # parents come before their children, but for the rare turn of the pids
            stat = fresh[pid]
            if pid in above:
                self._strangers.add(pid)
                continue
            environment = environment_of(pid)
            parent = stat.parent
            related = pid in self.started or parent == self.adopter or parent in alive or parent in found
            if related or pid in grouped or marked(environment, self._run, self._node):
                found[pid] = stat
                self._see(pid, stat, environment)
            elif environment or pid in self._blank:
                self._strangers.add(pid)
            else:
                self._blank.add(pid)
        return found

    def _see(self, pid: int, stat: Stat, environment: Dict[str, str]) -> None:
        """Keep a process in mind if it is a rank: it was given a rank, and its parent was not."""
        rank = environment.get("RANK", "")
        if pid in self.ranks:
            return
        if rank.isdigit() and "LOCAL_RANK" in environment and "LOCAL_RANK" not in environment_of(stat.parent):
            self.ranks[pid] = int(rank)
            handle = open_pidfd(pid)
            if handle is not None:
                self._handles[pid] = handle

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Let a selector wake up when a rank ends. The keys carry no data."""
        watched = selector.get_map()
        for handle in self._handles.values():
            if handle not in watched:
                selector.register(handle, selectors.EVENT_READ, None)

    def deaths(self, selector: selectors.BaseSelector) -> List[Death]:
        """The ranks that have ended since the last call, or whose end has begun and is known not to be a good one."""
        found = []
        for pid, rank in list(self.ranks.items()):
            stat = stat_of(pid)
            same = stat is not None and pid in self.known and stat.start == self.known[pid].start
            if stat is not None and same and stat.state not in "ZX" and not (stat.leaving and stat.status):
                continue
            found.append(Death(rank, pid, stat.status if stat is not None and same else None))
            del self.ranks[pid]
            handle = self._handles.pop(pid, None)
            if handle is not None:
                if handle in selector.get_map():
                    selector.unregister(handle)
                os.close(handle)
        return found

    def all(self) -> Dict[int, Stat]:
        """Every living process of the run, for certain: all of /proc is read."""
        found = members(self._run, self._node, self.started, self.adopter)
        above = spared()
        for pid in self._group.pids():
            stat = stat_of(pid)
            if stat is not None and stat.state not in "ZX" and pid not in above:
                found[pid] = stat
        self.known = found
        return found

    def kill(self) -> None:
        """SIGKILL to all that the cgroup holds."""
        self._group.kill()

    def close(self) -> None:
        """Let go of the descriptors, and of the cgroup when it is empty."""
        while self._handles:
            os.close(self._handles.popitem()[1])
        self.ranks.clear()
        self._group.remove()
