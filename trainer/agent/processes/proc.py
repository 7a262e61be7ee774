"""The processes of a run on this node: found by a mark in their environment, whatever group or session they are in.

A launcher starts its workers in sessions of their own and may die before them, so neither its process group nor
its name finds them. Three things do: the mark ``CLUSTERCTL_RUN`` that every process inherits; descending from the
command, or from an orphan that the agent's guard has adopted; and, where one could be made, a cgroup (``cgroup.py``).
The last two find a process that wiped its environment. ``census.py`` looks again and again at little cost,
``members`` at all.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Callable, Dict, Iterable, NamedTuple, Optional, Set

RUN = "CLUSTERCTL_RUN"
NODE = "CLUSTERCTL_NODE"  # tells two nodes of one run apart that share a machine, as in a rehearsal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # <linux/sched.h>, among the flags in /proc/PID/stat


class Stat(NamedTuple):
    """What /proc/PID/stat says.

    The state letter, the parent, the start time (it tells a reused pid), the clock ticks of processor time used so
    far, the wait status of one that has ended or is about to (0 when this user may not see it), and whether its end
    has begun: until its GPU's memory is given back, seconds may pass.
    """

    state: str
    parent: int
    start: str
    ticks: int = 0
    status: int = 0
    leaving: bool = False


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process. False where that is not possible."""
    try:
        import ctypes  # noqa: PLC0415 - a Python may lack it

        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent dies."""
    return prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> Callable[[], None]:
    """For ``preexec_fn``: the command gets SIGTERM when the agent dies without having ended it."""
    parent = os.getpid()
    prctl(_PR_SET_PDEATHSIG, 0)  # ctypes is loaded before the fork

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def read(path: str) -> bytes:
    """A file of /proc; empty when the process has ended or is another user's."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


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


def environment_of(pid: int) -> Dict[str, str]:
    """What a process was started with."""
    pairs = read("/proc/%d/environ" % pid).decode("utf-8", "surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def marked(environment: Dict[str, str], run: str, node: str) -> bool:
    """Whether an environment carries the mark of a run on a node."""
    return environment.get(RUN) == run and environment.get(NODE, node) == node


def spared() -> Set[int]:
    """This process and those above it."""
    found = {os.getpid()}
    above: Optional[Stat] = stat_of(os.getpid())
    while above is not None and above.parent and above.parent not in found:
        found.add(above.parent)
        above = stat_of(above.parent)
    return found


def pids() -> Set[int]:
    """Every process there is."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - a Path for each is slow


def members(run: str, node: str, roots: Iterable[int] = (), adopter: Optional[int] = None) -> Dict[int, Stat]:
    """The run's living processes here: those that carry its mark, and those that descend from what the agent knows.

    Args:
        run: the run's id.
        node: the node's name.
        roots: processes that belong to the run whatever they carry, with all that descends from them.
        adopter: the guard: what it has adopted belongs to the run too. This process and those above never do.
    """
    table: Dict[int, Stat] = {}
    for pid in pids():
        found = stat_of(pid)
        if found is not None:
            table[pid] = found
    children: Dict[int, Set[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, set()).add(pid)
    mine = spared()
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
        if pid not in mine and stat.state not in "ZX" and (pid in ours or marked(environment_of(pid), run, node))
    }


def open_pidfd(pid: int) -> Optional[int]:
    """A descriptor that becomes readable when the process ends; None before Python 3.9 and Linux 5.3."""
    pidfd_open = getattr(os, "pidfd_open", None)
    try:
        return int(pidfd_open(pid)) if pidfd_open else None
    except OSError:
        return None


def send(pid: int, stat: Stat, number: int) -> bool:
    """Signal a process, unless the pid has passed to another one meanwhile. False when that is not allowed."""
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
    """The wait status of a child that has ended; None while it has not. No other child is touched."""
    try:
        pid, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if pid == child else None


def reap_all() -> None:
    """Collect every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def described(status: int) -> str:
    """Describe a wait status: ``was killed by SIGKILL``, ``exited with code 3``."""
    number = ended_by(status)
    if number is not None:
        return "was killed by %s" % number
    return "exited with code %d" % os.WEXITSTATUS(status)


def ended_by(status: int) -> Optional[str]:
    """The name of the signal in a wait status; None for one that has ended of itself."""
    return signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
