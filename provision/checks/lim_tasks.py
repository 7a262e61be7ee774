"""lim.tasks: the session's control group allows enough threads.

systemd puts every login into a slice whose ``TasksMax`` is a share of the machine's (systemd.resource-control(5)); the
kernel counts threads in ``pids.max`` of every group around the session (cgroup v2, "PID Interface Files"). Unlike
``ulimit -u`` it binds root, and ``ulimit`` does not show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown, warn
from provision.checks._facts import SESSION
from provision.checks._host import tightest
from provision.model import Finding

ID = "lim.tasks"
LEVEL = 0
TITLE = "the session's control group allows enough threads"
PROBE = SESSION
LIMITS = {"tasks": 16384, "tasks_least": 4096}
WHY = "A limit of the login's slice makes thread creation fail although ulimit shows plenty."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """The tightest group counts."""
    for name, answer in answers.items():
        if not any(line.startswith("group ") for line in answer.lines):
            yield unknown(ID, name, "no control groups at /sys/fs/cgroup")
            continue
        found = tightest(answer)
        if found is None or found[1] >= seen.limits["tasks"]:
            yield ok(ID, name, f"{found[1]} in {found[0]}" if found else "no limit")
            continue
        group, limit = found
        verdict = warn if limit >= seen.limits["tasks_least"] else fail
        unit = group.rstrip("/").rpartition("/")[2] or "-.slice"
        yield verdict(
            ID,
            name,
            f"{limit} in {group}",
            expected=f"at least {seen.limits['tasks']:.0f}",
            fix=f"as root: systemctl set-property {unit} TasksMax=infinity",
        )
