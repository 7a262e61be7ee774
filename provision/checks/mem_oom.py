"""mem.oom: no process was killed for lack of memory since the node started.

``oom_kill`` of /proc/vmstat counts them since boot, in control groups as well (kernel 4.13 and later). Anybody may read
it, unlike the kernel log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import MEMORY
from provision.checks._host import many, number, pairs, unread
from provision.model import Finding

ID = "mem.oom"
LEVEL = 0
TITLE = "no process was killed for lack of memory since the node started"
PROBE = MEMORY
WHY = "What was killed for lack of memory once is killed again: often a data loader, and the ranks hang waiting for it."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with their number."""
    for name, answer in answers.items():
        count = number(pairs(answer).get("oom_kill"))
        if count is None:
            yield unread(ID, name, answer)
        elif count == 0:
            yield ok(ID, name, "none killed")
        else:
            said = f"{many(count, 'process', 'processes')} killed for lack of memory since boot"
            yield warn(ID, name, said, expected="none", fix="see which: journalctl -k | grep -i 'out of memory'")
