"""mem.cgroup: the session's control group does not limit the memory.

``memory.max`` of every group around the session (cgroup v2, "Memory Interface Files"), ``memory.limit_in_bytes`` in
version 1, where "no limit" is a number larger than any memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.checks._facts import MEMORY
from provision.checks._host import human, kib, pairs, tightest, unread
from provision.model import Finding

ID = "mem.cgroup"
LEVEL = 0
TITLE = "the session's control group does not limit the memory"
PROBE = MEMORY
LIMITS = {"share_percent": 90}
WHY = "A job started by ssh is killed at the group's limit although the machine has memory left."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """The tightest group against the machine's memory."""
    for name, answer in answers.items():
        total = kib(pairs(answer).get("MemTotal"))
        if total is None:
            yield unread(ID, name, answer)
            continue
        if not any(line.startswith("group ") for line in answer.lines):
            yield unknown(ID, name, "no control groups at /sys/fs/cgroup")
            continue
        found = tightest(answer)
        if found is None or found[1] >= total * seen.limits["share_percent"] / 100:
            yield ok(ID, name, "no limit")
            continue
        group, limit = found
        unit = group.rstrip("/").rpartition("/")[2] or "-.slice"
        yield warn(
            ID,
            name,
            f"{human(limit)} of {human(total)} in {group}",
            expected=f"at least {seen.limits['share_percent']:g} % of the memory",
            fix=f"as root: systemctl set-property {unit} MemoryMax=infinity",
        )
