"""cpu.gov: the processors run at full speed.

The governor in ``cpufreq/scaling_governor`` of every CPU (Documentation/admin-guide/pm/cpufreq.rst). Virtual machines,
and machines whose firmware holds the clock, have no such file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import PROCESSORS
from provision.checks._host import many, pairs, unread
from provision.model import Finding

ID = "cpu.gov"
LEVEL = 0
TITLE = "the processors run at full speed"
PROBE = PROCESSORS
WHY = "One CPU thread launches the kernels of a GPU: at a low clock the GPU waits for it between short kernels."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where any CPU has another governor than performance."""
    for name, answer in answers.items():
        counts: Counter[str] = Counter()
        for line in answer.lines:
            if found := re.fullmatch(r"governor ([0-9]+) (\S+)", line):
                counts[found[2]] += int(found[1])
        if "online" not in pairs(answer):
            yield unread(ID, name, answer)
            continue
        slow = [f"{many(count, 'CPU')} {governor}" for governor, count in counts.items() if governor != "performance"]
        if slow:
            fix = "cpupower frequency-set -g performance, and a unit or tuned profile that does it at boot"
            yield warn(ID, name, ", ".join(slow), expected="performance", fix=fix)
        else:
            yield ok(ID, name, "performance" if counts else "the system does not scale the clock")
