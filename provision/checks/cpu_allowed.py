"""cpu.allowed: a session may use every processor.

``Cpus_allowed_list`` of /proc/self/status (proc_pid_status(5)) is the affinity within the session's cpuset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import PROCESSORS
from provision.checks._host import cpus, pairs, unread
from provision.model import Finding

ID = "cpu.allowed"
LEVEL = 0
TITLE = "a session may use every processor"
PROBE = PROCESSORS
WHY = "All ranks and data loaders of the node share the few processors that are allowed, and the GPUs wait for data."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where fewer are allowed than online."""
    for name, answer in answers.items():
        told = pairs(answer)
        allowed, online = cpus(told.get("Cpus_allowed_list")), cpus(told.get("online"))
        if allowed is None or online is None:
            yield unread(ID, name, answer)
        elif allowed >= online:
            yield ok(ID, name, f"all {online}")
        else:
            fix = "look for CPUAffinity= or AllowedCPUs= in sshd's unit and user.slice, and isolcpus= in /proc/cmdline"
            yield warn(
                ID, name, f"{told['Cpus_allowed_list']} of {told['online']}", expected=f"all {online} CPUs", fix=fix
            )
