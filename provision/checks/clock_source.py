"""clock.source: Whether the kernel reads a clock that is quick to read.

/sys/devices/system/clocksource/clocksource0: the kernel falls back to hpet or acpi_pm when it finds the processors' own
counters (tsc) to disagree; reading those takes a microsecond or more (kernel, timekeeping.rst).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.model import Finding

ID = "clock.source"
LEVEL = 0
TITLE = "the kernel's clock is the processor's counter"
WHY = (
    "Profilers, NCCL and the kernel read the clock all the time: hpet and acpi_pm cost a call into slow hardware each."
)
PROBE = "cd /sys/devices/system/clocksource/clocksource0 && cat current_clocksource available_clocksource"
_SLOW = {"hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit"}


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN for a slow clock."""
    for name, answer in answers.items():
        if len(answer.lines) != 2:
            yield unknown(ID, name, "the kernel does not name its clock")
            continue
        current, available = answer.lines
        if current in _SLOW:
            said = f"{current} (available: {available})"
            fix = "dmesg | grep -i tsc says why; update the BIOS, or boot with tsc=reliable where it is known to be"
            yield warn(ID, name, said, expected="tsc, or that of the hypervisor", fix=fix)
        else:
            yield ok(ID, name, current)
