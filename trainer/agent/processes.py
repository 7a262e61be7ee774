"""Finds the processes of a run on this node, whatever process group or session they are in, and the ranks among them.

A launcher starts its workers in new sessions and may die before them, so neither its process group nor its name finds
them. A process belongs to the run if it has the mark ``CLUSTERCTL_RUN`` in its environment, if it descends from the
command or from an orphan that the agent's guard adopted, or if it is in the run's cgroup (``tracker.py``). The last two
find a process that cleared its environment.

A rank's main process is the first one with ``RANK``: the workers of its DataLoader inherit it. If no process has one,
as in a plain script on one GPU, the command itself is the only rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Set, Tuple

RUN = "CLUSTERCTL_RUN"
NODE = "CLUSTERCTL_NODE"  # distinguishes two nodes of one run on one machine, as in a rehearsal

_MARK = b"%s=" % RUN.encode()
_PIECE = 64 << 10  # bytes read at a time
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # <linux/sched.h>, among the flags in /proc/PID/stat


class Stat(NamedTuple):
    """The fields of /proc/PID/stat.

    The state letter, the parent, the start time (it identifies a reused pid), the clock ticks of processor time, the
    wait status of a process that has exited or is exiting (0 when this user may not see it), and whether it is
    exiting: the kernel may need seconds to free its GPU's memory.
    """

    state: str
    parent: int
    start: str
    ticks: int = 0
    status: int = 0
    leaving: bool = False


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process. False if that is not possible."""
    try:
        import ctypes  # noqa: PLC0415 - a Python may lack it

        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies."""
    return prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> Callable[[], None]:
    """For ``preexec_fn``: the command gets SIGTERM when the agent dies."""
    parent = os.getpid()
    prctl(_PR_SET_PDEATHSIG, 0)  # ctypes is loaded before the fork

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def read(path: str) -> bytes:
    """Read a file of /proc; empty when the process has exited or belongs to another user."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a file object would double the cost of a look at /proc
    except OSError:
        return b""
    data = b""
    with contextlib.suppress(OSError):
        while True:
            piece = os.read(fd, _PIECE)
            data += piece
            if not piece:
                break
    os.close(fd)
    return data


def stat_of(pid: int) -> Optional[Stat]:
    """Read /proc/PID/stat (proc(5)); None when there is no such process."""
    _, _, rest = read("/proc/%d/stat" % pid).rpartition(b")")  # the name before it may hold anything
    fields = rest.split()
    if len(fields) < 20:
        return None
    status = int(fields[49]) if len(fields) > 49 else 0
    leaving = bool(int(fields[6]) & _PF_EXITING)
    ticks = int(fields[11]) + int(fields[12])
    return Stat(fields[0].decode(), int(fields[1]), fields[19].decode(), ticks, status, leaving)


def environ_of(pid: int) -> bytes:
    """The environment that a process started with, as /proc shows it."""
    return read("/proc/%d/environ" % pid)


def parse_environment(data: bytes) -> Dict[str, str]:
    """Parse the content of /proc/PID/environ."""
    pairs = data.decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def environment_of(pid: int) -> Dict[str, str]:
    """The environment that a process started with."""
    return parse_environment(environ_of(pid))


def has_mark(data: bytes, run: str, node: str) -> bool:
    """Whether an environment, as /proc shows it, has the mark of a run on a node."""
    if _MARK not in data:  # most processes are not of any run
        return False
    environment = parse_environment(data)
    return environment.get(RUN) == run and environment.get(NODE, node) == node


def own_ancestry() -> Set[int]:
    """This process and its ancestors."""
    found = {os.getpid()}
    above: Optional[Stat] = stat_of(os.getpid())
    while above is not None and above.parent and above.parent not in found:
        found.add(above.parent)
        above = stat_of(above.parent)
    return found


def pids() -> Set[int]:
    """All processes."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - a Path for each is slow


def members(run: str, node: str, roots: Iterable[int] = (), adopter: Optional[int] = None) -> Dict[int, Stat]:
    """The run's living processes on this node: those with its mark, and descendants of known ones.

    Args:
        run: the run's id.
        node: the node's name.
        roots: processes that belong to the run in any case, with their descendants.
        adopter: the guard: processes that it adopted belong to the run too. This process and its ancestors never do.
    """
    table: Dict[int, Stat] = {}
    for pid in pids():
        found = stat_of(pid)
        if found is not None:
            table[pid] = found
    children: Dict[int, Set[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, set()).add(pid)
    mine = own_ancestry()
    ours: Set[int] = set()
    below = set(roots) | (children.get(adopter, set()) if adopter is not None else set())
    while below:
        pid = below.pop()
        if pid not in ours and pid not in mine:
            ours.add(pid)
            below |= children.get(pid, set())
    return {
        pid: stat
        for pid, stat in table.items()
        if pid not in mine and stat.state not in "ZX" and (pid in ours or has_mark(environ_of(pid), run, node))
    }


def open_pidfd(pid: int) -> Optional[int]:
    """A descriptor that becomes readable when the process exits; None before Python 3.9 and Linux 5.3."""
    pidfd_open = getattr(os, "pidfd_open", None)
    try:
        return int(pidfd_open(pid)) if pidfd_open else None
    except OSError:
        return None


def send(pid: int, stat: Stat, number: int) -> bool:
    """Signal a process, unless another process has its pid now. False when that is not allowed."""
    handle = open_pidfd(pid)
    try:
        now = stat_of(pid)
        if now is None or now.start != stat.start:
            return True
        with contextlib.suppress(ProcessLookupError):
            if handle is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    else:
        return True
    finally:
        if handle is not None:
            os.close(handle)


def reap(child: int) -> Optional[int]:
    """The wait status of a child that has exited, else None. Reaps no other child."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if pid == child else None


def reap_all() -> None:
    """Reap all children that have exited."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def describe_status(status: int) -> str:
    """Describe a wait status: ``was killed by SIGKILL``, ``exited with code 3``."""
    number = signal_of(status)
    if number is not None:
        return "was killed by %s" % number
    return "exited with code %d" % os.WEXITSTATUS(status)


def signal_of(status: int) -> Optional[str]:
    """The name of the signal in a wait status; None for a process that exited."""
    return signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number itself if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


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
            rank is not the rank.
    """
    found: Dict[int, int] = {}
    for pid in sorted(ranks, key=lambda pid: (int(members[pid].start), pid)):
        if members[pid].parent not in ranks and (pid, members[pid].start) not in known:
            found.setdefault(ranks[pid], pid)
    if not ranks and first_rank is not None:
        commands = [pid for pid, stat in members.items() if stat.parent == os.getpid()]
        found = {first_rank: min(commands, key=lambda pid: int(members[pid].start))} if commands else {}
    return found
