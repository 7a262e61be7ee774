"""gpu.memory: all GPUs have the same amount of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._judging import close
from provision.checks._nvidia import GPUS, SMI, alike, gpus
from provision.model import Finding

ID = "gpu.memory"
LEVEL = 0
TITLE = "all GPUs have the same amount of memory"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"differ_percent": 2}  # drivers reserve a little more or less
WHY = "A batch that fits the other GPUs runs out of memory on a smaller one, and ends the run."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where the memory differs by more than the limit."""
    found = yield from gpus(ID, answers, "memory.total")
    sizes = {
        f"{node}/{gpu.index}": size
        for node, row in found.items()
        for gpu in row
        if (size := gpu.number("memory.total")) is not None
    }
    rounded = close(sizes, seen.limits["differ_percent"] / 100)
    nodes = {node: {gpu.index: _text(rounded.get(f"{node}/{gpu.index}")) for gpu in row} for node, row in found.items()}
    fix = "replace the GPU or leave the node out (--exclude); nvidia-smi -q -d MEMORY,ECC shows what is reserved"
    yield from alike(ID, nodes, what="", fix=fix, verdict="FAIL")


def _text(mib: float | None) -> str:
    return "unified memory" if mib is None else f"{mib:.0f} MiB"
