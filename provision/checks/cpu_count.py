"""cpu.count: every processor is online, as many as on the other nodes.

``present``, ``online`` and ``smt/control`` of /sys/devices/system/cpu (ABI/testing/sysfs-devices-system-cpu). Where
SMT is switched off the second threads are present and offline on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, warn
from provision.checks._facts import PROCESSORS
from provision.checks._host import cpus, many, pairs, unread
from provision.checks._judging import odd
from provision.model import Finding

ID = "cpu.count"
LEVEL = 0
TITLE = "every processor is online, as many as on the other nodes"
PROBE = PROCESSORS
WHY = "A node with fewer processors feeds its GPUs more slowly, and every other node waits for it in every step."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """Offline processors first, then their number compared."""
    numbers: dict[str, int] = {}
    for name, answer in answers.items():
        told = pairs(answer)
        present, online = cpus(told.get("present")), cpus(told.get("online"))
        if present is None or online is None:
            yield unread(ID, name, answer)
        elif online < present and told.get("smt") not in {"off", "forceoff"}:
            said = f"{online} of {present} CPUs online ({told['online']})"
            fix = "echo 1 into /sys/devices/system/cpu/cpuN/online; if it stays offline see dmesg and the firmware"
            yield warn(ID, name, said, expected=f"{present} CPUs", fix=fix)
        else:
            numbers[name] = online
    fix = "set hyper-threading and core counts alike in the firmware; look for maxcpus= and nosmt in /proc/cmdline"
    yield from odd(ID, numbers, fix=fix, show=lambda count: many(count, "CPU"))
