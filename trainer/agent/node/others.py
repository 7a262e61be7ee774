"""The runs that have processes on this node, so that two of them do not meet on one GPU.

A run's processes carry its mark; those of another user, whose environment may not be read, are found by being
descendants of their agent, whose command line anybody may read. A run without an agent was left behind by one.
"""

from __future__ import annotations

import os
import pwd
import re
from typing import Any, Dict, List, NamedTuple, Optional

from processes.proc import RUN, Stat, read, stat_of

# ``python -I <root>/runs/<run>/agent COMMAND``; those that only look are no sign of a run that goes on.
_AGENT = re.compile(rb"\0(?:[^\0]*/)?runs/([^/\0]+)/agent\0([^\0]+)\0")
_LOOKS = (b"probe", b"digest", b"talk", b"follow", b"stop")
_MARK = re.compile(rb"\0%s=([^\0]+)\0" % RUN.encode())
_VISIBLE = re.compile(rb"\0CUDA_VISIBLE_DEVICES=([^\0]*)\0")


class _Process(NamedTuple):
    stat: Stat
    user: int
    run: str  # by its mark; "" without one
    agent: str  # the run that it is the agent of
    visible: Optional[str]


def runs() -> List[Dict[str, Any]]:
    """Every run with living processes here, sorted: ``run``, ``user``, ``agent``, ``pids`` and ``visible``.

    ``agent`` tells whether its agent lives; ``pids`` are its processes without the agent's; ``visible`` is the
    CUDA_VISIBLE_DEVICES that they have, null where none is set or they are another user's.
    """
    table = _processes()
    found: Dict[str, Dict[str, Any]] = {}
    for pid, process in sorted(table.items()):
        run = process.agent or process.run or _above(table, pid)
        if not run:
            continue
        about = found.setdefault(
            run, {"run": run, "user": _name(process.user), "agent": False, "pids": [], "visible": None}
        )
        if process.agent:
            about["agent"] = True
        else:
            about["pids"].append(pid)
        if about["visible"] is None:
            about["visible"] = process.visible
    return [found[run] for run in sorted(found)]


def _processes() -> Dict[int, _Process]:
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each process is slow
        stat = stat_of(int(name)) if name.isdigit() else None
        if stat is None or stat.state in "ZX":
            continue
        environment = b"\0" + read("/proc/%s/environ" % name) + b"\0"
        line = _AGENT.search(b"\0" + read("/proc/%s/cmdline" % name) + b"\0")
        mark, visible = _MARK.search(environment), _VISIBLE.search(environment)
        try:
            user = os.stat("/proc/%s" % name).st_uid  # noqa: PTH116
        except OSError:  # it has ended
            continue
        table[int(name)] = _Process(
            stat,
            user,
            os.fsdecode(mark.group(1)) if mark else "",
            os.fsdecode(line.group(1)) if line and line.group(2) not in _LOOKS else "",
            os.fsdecode(visible.group(1)) if mark and visible else None,
        )
    return table


def _above(table: Dict[int, _Process], pid: int) -> str:
    """The run of the nearest agent above a process."""
    seen = set()
    while pid in table and pid not in seen:
        seen.add(pid)
        if table[pid].agent:
            return table[pid].agent
        pid = table[pid].stat.parent
    return ""


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
