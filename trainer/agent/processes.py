"""The processes of a run on this node: found by a mark in their environment, whatever group or session they are in.

A launcher starts its workers in sessions of their own and may die before them, so neither its process group nor
its name finds them. Two things do: the mark ``CLUSTERCTL_RUN`` that every process inherits, and being a descendant
of the agent, which adopts orphans (a process that wiped its environment is found by that).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Callable, Dict, NamedTuple, Optional, Set

RUN = "CLUSTERCTL_RUN"
NODE = "CLUSTERCTL_NODE"  # tells two nodes of one run apart that share a machine, as in a rehearsal

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


class Stat(NamedTuple):
    """What /proc/PID/stat says: the state letter, the parent, and the start time that tells a reused pid."""

    state: str
    parent: int
    start: str


def prctl(option: int, value: int) -> bool:
    """Set an attribute of this process. False where that is not possible."""
    try:
        import ctypes  # noqa: PLC0415 - a Python may lack it

        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
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


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:  # it has ended, or is another user's
        return b""


def stat_of(pid: int) -> Optional[Stat]:
    """Read /proc/PID/stat; None when there is no such process."""
    _, _, rest = _read("/proc/%d/stat" % pid).rpartition(b")")  # the name before it may hold anything
    fields = rest.split()
    return Stat(fields[0].decode(), int(fields[1]), fields[19].decode()) if len(fields) > 19 else None


def _carries(pid: int, run: str, node: str) -> bool:
    environment = b"\0" + _read("/proc/%d/environ" % pid) + b"\0"
    if ("\0%s=%s\0" % (RUN, run)).encode() not in environment:
        return False
    other = ("\0%s=" % NODE).encode()
    return other not in environment or ("\0%s=%s\0" % (NODE, node)).encode() in environment


def members(run: str, node: str) -> Dict[int, Stat]:
    """The run's living processes here: those that carry the mark and those that descend from this process."""
    table: Dict[int, Stat] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each process is slow
        found = stat_of(int(name)) if name.isdigit() else None
        if found is not None:
            table[int(name)] = found
    children: Dict[int, Set[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, set()).add(pid)
    ours: Set[int] = set()
    below = set(children.get(os.getpid(), ()))
    while below:
        pid = below.pop()
        if pid not in ours:
            ours.add(pid)
            below |= children.get(pid, set())
    spared = {os.getpid()}
    above = os.getpid()
    while above in table and table[above].parent not in spared:
        above = table[above].parent
        spared.add(above)
    return {
        pid: stat
        for pid, stat in table.items()
        if pid not in spared and stat.state not in "ZX" and (pid in ours or _carries(pid, run, node))
    }


def send(pid: int, stat: Stat, number: int) -> None:
    """Signal a process, unless the pid has passed to another one meanwhile."""
    pidfd_open = getattr(os, "pidfd_open", None)  # Python 3.9, Linux 5.3
    handle = None
    with contextlib.suppress(OSError):
        handle = pidfd_open(pid) if pidfd_open else None
    try:
        now = stat_of(pid)
        if now is None or now.start != stat.start:
            return
        with contextlib.suppress(OSError):
            if handle is None:
                os.kill(pid, number)
            else:
                signal.pidfd_send_signal(handle, number)  # type: ignore[attr-defined]
    finally:
        if handle is not None:
            os.close(handle)


def reap(child: int) -> Optional[int]:
    """Collect every child that has ended. The wait status of ``child`` when it was among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            status = ended
