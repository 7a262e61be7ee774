"""mem.swap: no swap is in use.

``SwapTotal`` and ``SwapFree`` of /proc/meminfo (proc_meminfo(5)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import MEMORY
from provision.checks._host import human, kib, pairs, unread
from provision.model import Finding

ID = "mem.swap"
LEVEL = 0
TITLE = "there is no swap"
PROBE = MEMORY
WHY = "A rank whose memory is swapped out stalls every other rank, for minutes and without a message."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where there is swap, used or not."""
    for name, answer in answers.items():
        told = pairs(answer)
        total, free = kib(told.get("SwapTotal")), kib(told.get("SwapFree"))
        if total is None or free is None:
            yield unread(ID, name, answer)
        elif total == 0:
            yield ok(ID, name, "no swap")
        else:
            said = f"{human(total)} of swap, {human(total - free)} in use"
            yield warn(ID, name, said, expected="none", fix="swapoff -a, and take it out of /etc/fstab")
