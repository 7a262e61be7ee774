"""gpu.used: the GPUs' memory is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.used"
LEVEL = 0
TITLE = "the memory of the GPUs is free"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"used_mib": 1024}  # a display or a monitoring service takes some hundred
WHY = "Memory that a process in a container or a dead program still holds is missing from the run's batch."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN where more is used than the limit, whoever it is: processes of containers are not listed by name."""
    most = seen.limits["used_mib"]
    found = yield from gpus(ID, answers, "memory.used")
    for node, row in found.items():
        used = {gpu.index: gpu.number("memory.used") or 0.0 for gpu in row}
        full = {index: f"{mib:.0f} MiB in use" for index, mib in used.items() if mib > most}
        if full:
            fix = "fuser -v /dev/nvidia* (as root) names who holds the GPUs; without anyone, reset them or reboot"
            yield warn(ID, node, each(full), expected=f"at most {most:.0f} MiB", fix=fix)
        else:
            yield ok(ID, node, f"at most {max(used.values()):.0f} MiB in use")
