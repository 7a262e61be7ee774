"""lim.nproc: enough processes and threads may run.

``RLIMIT_NPROC`` counts the threads of all of a user's processes; it does not bind ``CAP_SYS_RESOURCE`` (24 in
``<linux/capability.h>``; getrlimit(2)), which root has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._facts import SESSION
from provision.checks._host import may, soft_limit, unread
from provision.model import Finding

ID = "lim.nproc"
LEVEL = 0
TITLE = "enough processes and threads may run"
PROBE = SESSION
LIMITS = {"processes": 16384, "processes_least": 4096}
WHY = "Eight ranks with data loaders and NCCL's threads are thousands: 'can't start new thread' in the middle of a run."

_FIX = "write the line `* - nproc unlimited` to /etc/security/limits.d/91-nproc.conf, and log in again"
_SYS_RESOURCE = 24


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Two thresholds: what eight ranks need with room to spare, and what one rank needs."""
    for name, answer in answers.items():
        limit = soft_limit(answer, "processes")
        expected = f"at least {seen.limits['processes']:.0f}"
        if limit is None:
            yield unread(ID, name, answer)
        elif limit == "unlimited" or int(limit) >= seen.limits["processes"]:
            yield ok(ID, name, limit)
        elif may(answer, _SYS_RESOURCE):
            yield ok(ID, name, f"{limit}, which does not bind this user (CAP_SYS_RESOURCE)")
        elif int(limit) >= seen.limits["processes_least"]:
            yield warn(ID, name, limit, expected=expected, fix=_FIX)
        else:
            yield fail(ID, name, limit, expected=expected, fix=_FIX)
