"""lim.nofile: enough files may be open at once.

Data loaders that share tensors by file descriptor hold one for each, and every rank opens sockets to many others. The
default soft limit is 1024 (getrlimit(2)); 65536 leaves room for eight ranks with their loaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._facts import SESSION
from provision.checks._host import soft_limit, unread
from provision.model import Finding

ID = "lim.nofile"
LEVEL = 0
TITLE = "enough files may be open at once"
PROBE = SESSION
LIMITS = {"files": 65536, "files_least": 4096}
WHY = "Data loaders and NCCL's sockets run out of file descriptors: 'Too many open files', often hours into a run."

_FIX = "put `limits: {}` under `services` in the inventory, `clusterctl deploy`, and log in again"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Two thresholds: what a large job needs, and what any job needs."""
    for name, answer in answers.items():
        limit = soft_limit(answer, "open files")
        expected = f"at least {seen.limits['files']:.0f}"
        if limit is None:
            yield unread(ID, name, answer)
        elif limit == "unlimited" or int(limit) >= seen.limits["files"]:
            yield ok(ID, name, limit)
        elif int(limit) >= seen.limits["files_least"]:
            yield warn(ID, name, limit, expected=expected, fix=_FIX)
        else:
            yield fail(ID, name, limit, expected=expected, fix=_FIX)
