"""lim.memlock: memory may be locked without a limit.

RDMA registers what it sends as locked memory. ``CAP_IPC_LOCK`` (14 in ``<linux/capability.h>``), which root has, is not
bound by the limit (getrlimit(2)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok
from provision.checks._facts import SESSION
from provision.checks._host import human, many, may, soft_limit, unread
from provision.checks._judging import found_as
from provision.model import Finding

ID = "lim.memlock"
LEVEL = 0
TITLE = "memory may be locked without a limit"
PROBE = SESSION
WHY = "NCCL cannot register its buffers with the InfiniBand card: the job ends with 'ibv_reg_mr failed' or ENOMEM."

_FIX = "put `limits: {}` under `services` in the inventory, `clusterctl deploy`, and log in again"
_IPC_LOCK = 14


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL where the node has RDMA devices, else WARN."""
    for name, answer in answers.items():
        limit = soft_limit(answer, "locked memory")
        if limit is None:
            yield unread(ID, name, answer)
        elif limit == "unlimited":
            yield ok(ID, name, "unlimited")
        elif may(answer, _IPC_LOCK):
            yield ok(ID, name, f"{human(int(limit))}, which does not bind this user (CAP_IPC_LOCK)")
        else:
            devices = sum(line.startswith("device ") for line in answer.lines)
            said = f"{human(int(limit))}" + (f" with {many(devices, 'RDMA device')}" if devices else "")
            yield found_as(ID, name, "FAIL" if devices else "WARN", said, expected="unlimited", fix=_FIX)
