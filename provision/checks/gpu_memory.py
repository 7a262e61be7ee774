"""gpu.memory: all GPUs have the same amount of memory."""

from provision.checks.kit import Answers, Judgements, Plan, close
from provision.checks.kit.gpu import GPUS, SMI, alike, gpus

TITLE = "all GPUs have the same amount of memory"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"differ_percent": 2}  # drivers reserve a little more or less
WHY = "A batch that fits the other GPUs runs out of memory on a smaller one, and ends the run."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where the memory differs by more than the limit."""
    found = yield from gpus(answers, "memory.total")
    sizes = {
        f"{node}/{gpu.index}": size
        for node, row in found.items()
        for gpu in row
        if (size := gpu.number("memory.total")) is not None
    }
    rounded = close(sizes, seen.limits["differ_percent"] / 100)
    nodes = {node: {gpu.index: _text(rounded.get(f"{node}/{gpu.index}")) for gpu in row} for node, row in found.items()}
    fix = "replace the GPU or leave the node out (--exclude); nvidia-smi -q -d MEMORY,ECC shows what is reserved"
    yield from alike(nodes, noun="", fix=fix, verdict="FAIL")


def _text(mib: float | None) -> str:
    return "unified memory" if mib is None else f"{mib:.0f} MiB"
