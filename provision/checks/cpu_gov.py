"""cpu.gov: the processors run at full speed.

The governor in ``cpufreq/scaling_governor`` of every CPU (Documentation/admin-guide/pm/cpufreq.rst). Virtual machines,
and machines whose firmware holds the clock, have no such file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import unread
from provision.model import Finding

ID = "cpu.gov"
LEVEL = 0
TITLE = "the processors run at full speed"
PROBE = """\
cat /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor 2>/dev/null | sort | uniq -c
echo looked
"""
WHY = "Kernels are launched by one CPU thread a GPU: at a low clock the GPU waits for it, up to a third of small steps."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where any CPU has another governor than performance."""
    for name, answer in answers.items():
        counts = [line.split() for line in answer.lines if line != "looked"]
        if "looked" not in answer.lines or not all(len(each) == 2 for each in counts):
            yield unread(ID, name, answer)
            continue
        slow = [f"{count} CPUs {governor}" for count, governor in counts if governor != "performance"]
        if slow:
            fix = "cpupower frequency-set -g performance, and a unit or tuned profile that does it at boot"
            yield warn(ID, name, ", ".join(slow), expected="performance", fix=fix)
        else:
            yield ok(ID, name, "performance" if counts else "the system does not scale the clock")
