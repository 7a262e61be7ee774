"""Tracks the processes of a run on this node, finds the ranks among them, and ends them.

Reading all of /proc takes tens of milliseconds on a large machine. So ``ProcessTracker`` does not read a foreign
process again, and waits longer between looks the more the last one cost. ``ProcessTracker.all`` is exact: it reads all
of /proc with ``processes.members``.

Where this user may create a cgroup (v2 only; in practice root's runs), the run's processes are in it, and cannot leave
it. No controller is enabled: the cgroup is a list of processes that the kernel keeps, and a way to kill all of them at
once. Elsewhere the marks of ``processes.py`` suffice.

Ending a run sends SIGTERM, after a grace period SIGKILL, until all of /proc shows no process of the run.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Set

from .processes import (
    Stat,
    environ_of,
    environment_of,
    has_mark,
    members,
    open_pidfd,
    own_ancestry,
    parse_environment,
    pids,
    read,
    reap_all,
    send,
    stat_of,
)

BUSY = 1.0  # seconds in which the kernel removes processes that have exited
RETRY = 0.01  # seconds between tries


def cgroup_mount(table: str = "/proc/self/mounts") -> Optional[str]:
    """The mount point of cgroup v2."""
    for line in read(table).decode("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return fields[1]
    return None


class Group:
    """A run's cgroup on one node; ``path`` is None without one, and every list is empty then."""

    def __init__(self, run: str, node: str) -> None:
        root = cgroup_mount()
        name = "clusterctl-" + re.sub(r"[^A-Za-z0-9._-]", "-", "%s-%s" % (run, node))
        self.path = "%s/%s" % (root, name) if root else None
        self._exists = self.path is not None and os.path.isdir(self.path)  # noqa: PTH112

    def make(self) -> bool:
        """Create the cgroup, or use the existing one. False if that is not possible."""
        if self.path is None:
            return False
        with contextlib.suppress(OSError):
            os.mkdir(self.path)  # noqa: PTH102
        self._exists = os.access(self.path + "/cgroup.procs", os.W_OK)
        return self._exists

    def preexec(self) -> Callable[[], None]:
        """For ``preexec_fn``: the process enters the cgroup before it becomes the command."""
        path = "%s/cgroup.procs" % self.path if self._exists else None

        def enter() -> None:
            if path is None:
                return
            with contextlib.suppress(OSError):  # then the marks must suffice
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, b"0")
                os.close(fd)

        return enter

    def pids(self) -> List[int]:
        """The processes in the cgroup."""
        if not self._exists:
            return []
        return [int(word) for word in read("%s/cgroup.procs" % self.path).split() if word != b"0"]

    def kill(self) -> None:
        """Send SIGKILL to all of them at once (Linux 5.14; older ones have no such file)."""
        if self._exists:
            with contextlib.suppress(OSError):
                fd = os.open("%s/cgroup.kill" % self.path, os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, b"1")
                os.close(fd)

    def remove(self) -> None:
        """Remove the cgroup; one that still has a process after ``BUSY`` seconds stays."""
        limit = time.monotonic() + BUSY
        while self._exists and not self._removed() and time.monotonic() < limit:
            time.sleep(RETRY)  # processes that were just killed are still exiting; no event reports their exit

    def _removed(self) -> bool:
        try:
            os.rmdir(str(self.path))  # noqa: PTH106
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


LOOK = 2.0  # seconds between looks, at least
RARELY = 10.0  # and at most
SHARE = 0.003  # of one core that looking may take


class Death(NamedTuple):
    """A rank's process that has exited; ``status`` is its wait status, None when its parent has reaped it."""

    rank: int
    pid: int
    status: Optional[int]


class ProcessTracker:
    """The known processes of a run on this node."""

    def __init__(self, run: str, node: str, group: Optional[Group] = None, adopter: Optional[int] = None) -> None:
        self.started: Set[int] = set()  # running children of this process; their descendants belong to the run
        self.adopter = adopter  # the guard, while it lives
        self.known: Dict[int, Stat] = {}
        self.ranks: Dict[int, int] = {}  # pid: global rank
        self._run, self._node = run, node
        self._group = group or Group(run, node)
        self._young: Set[int] = set()  # first seen in the last look: may still become another program
        self._strangers: Set[int] = set()
        self._blank: Set[int] = set()  # without a readable environment: another user's, or during an exec
        self._handles: Dict[int, int] = {}  # pid of a rank: pidfd
        self._due = 0.0

    def due(self, now: float) -> bool:
        """Whether the next look is due."""
        return now >= self._due

    def look(self) -> Dict[int, Stat]:
        """Return the living processes of the run. Reads only new processes and the run's own."""
        began = time.thread_time()  # a look takes longer on a busy machine, but costs the same
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
        """The new processes that belong to the run."""
        above = own_ancestry()
        grouped = set(self._group.pids())
        found: Dict[int, Stat] = {}
        for pid in sorted(fresh):  # parents come before their children, except when pids wrap around
            stat = fresh[pid]
            if pid in above:
                self._strangers.add(pid)
                continue
            environment = environ_of(pid)
            parent = stat.parent
            related = pid in self.started or parent == self.adopter or parent in alive or parent in found
            if related or pid in grouped or has_mark(environment, self._run, self._node):
                found[pid] = stat
                self._see(pid, stat, parse_environment(environment))
            elif environment or pid in self._blank:
                self._strangers.add(pid)
            else:
                self._blank.add(pid)
        return found

    def _see(self, pid: int, stat: Stat, environment: Dict[str, str]) -> None:
        """Record a process if it is a rank: it has a rank in its environment, and its parent has none."""
        rank = environment.get("RANK", "")
        if pid in self.ranks:
            return
        if rank.isdigit() and "LOCAL_RANK" in environment and "LOCAL_RANK" not in environment_of(stat.parent):
            self.ranks[pid] = int(rank)
            handle = open_pidfd(pid)
            if handle is not None:
                self._handles[pid] = handle

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Let a selector wake up when a rank exits. The keys have no data."""
        watched = selector.get_map()
        for handle in self._handles.values():
            if handle not in watched:
                selector.register(handle, selectors.EVENT_READ, None)

    def deaths(self, selector: selectors.BaseSelector) -> List[Death]:
        """The ranks that have exited since the last call, or are exiting with a failure."""
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
        """All living processes of the run. Exact: reads all of /proc."""
        found = members(self._run, self._node, self.started, self.adopter)
        above = own_ancestry()
        for pid in self._group.pids():
            stat = stat_of(pid)
            if stat is not None and stat.state not in "ZX" and pid not in above:
                found[pid] = stat
        self.known = found
        return found

    def kill(self) -> None:
        """Send SIGKILL to all processes in the cgroup."""
        self._group.kill()

    def close(self) -> None:
        """Close the descriptors, and remove the cgroup if it is empty."""
        while self._handles:
            os.close(self._handles.popitem()[1])
        self.ranks.clear()
        self._group.remove()


HURRY = 0.02  # seconds between looks at known processes
CERTAIN = 0.5  # seconds between looks at all of /proc while known ones are alive
STUBBORN = 30.0  # seconds after SIGKILL until a process counts as stuck in the kernel


class Ending:
    """Ends all processes of a run. Call ``step`` until it is true; ``left`` then has the processes that remain."""

    def __init__(self, tracker: ProcessTracker, grace: float) -> None:
        self.left: List[int] = []
        self.refused: Set[int] = set()  # another user's: signals are not allowed
        self._tracker = tracker
        self._grace = grace
        self._began: Optional[float] = None
        self._reported: Set[int] = set()
        self._living: Dict[int, Stat] = {}
        self._looked = 0.0

    def hurry(self, grace: float) -> None:
        """Shorten the grace period."""
        self._grace = min(self._grace, grace)

    def step(self, now: float) -> bool:
        """Look, and signal the living ones. True when none is left or the rest cannot be ended."""
        self._living = {pid: stat for pid, stat in self._living.items() if _lives(pid, stat)}
        if not self._living or now - self._looked >= CERTAIN:
            self._looked = now
            self._living = self._tracker.all()
        if not self._living:
            self.left = []
            return True
        if self._began is None:
            self._began = now
        patience = self._began + self._grace
        if now >= patience:
            self._tracker.kill()
        for pid, stat in self._living.items():
            if now >= patience:
                self._send(pid, stat, signal.SIGKILL)
            elif pid not in self._reported:
                self._reported.add(pid)
                self._send(pid, stat, signal.SIGTERM)
                self._send(pid, stat, signal.SIGCONT)  # a stopped process would not react to SIGTERM
        self.left = sorted(self._living)
        if self._living.keys() <= self.refused:
            return True
        return now >= patience + STUBBORN

    def _send(self, pid: int, stat: Stat, number: int) -> None:
        if not send(pid, stat, number):
            self.refused.add(pid)


def _lives(pid: int, stat: Stat) -> bool:
    now = stat_of(pid)
    return now is not None and now.start == stat.start and now.state not in "ZX"


def end_all(tracker: ProcessTracker, grace: float) -> List[int]:
    """End every process of the run and wait. Returns the pids that could not be ended."""
    ending = Ending(tracker, grace)
    while True:
        reap_all()
        if ending.step(time.monotonic()):
            return ending.left
        time.sleep(HURRY)  # most are not children of this process, so no event reports their exit
