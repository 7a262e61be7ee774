"""gpu.used: the GPUs' memory is free."""

from provision.checks.kit import Answers, Judgements, Plan, ok, warn
from provision.checks.kit.gpu import GPUS, SMI, each, gpus

TITLE = "the memory of the GPUs is free"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"used_mib": 1024}  # a display or a monitoring service takes some hundred
WHY = "Memory that a process in a container or a dead program still holds is missing from the run's batch."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN where more is used than the limit, whatever uses it: processes of containers are not listed by name."""
    most = seen.limits["used_mib"]
    found = yield from gpus(answers, "memory.used")
    for node, row in found.items():
        used = {gpu.index: gpu.number("memory.used") or 0.0 for gpu in row}
        full = {index: f"{mib:.0f} MiB in use" for index, mib in used.items() if mib > most}
        if full:
            fix = "fuser -v /dev/nvidia* (as root) shows what holds the GPUs; if nothing does, reset them or reboot"
            yield node, warn(each(full), expected=f"at most {most:.0f} MiB", fix=fix)
        else:
            yield node, ok(f"at most {max(used.values()):.0f} MiB in use")
