"""gpu.computemode: any number of processes may use a GPU (compute mode Default)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.computemode"
LEVEL = 0
TITLE = "compute mode is Default"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "In an exclusive mode a second context ends in 'all CUDA-capable devices are busy', in Prohibited the first one."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for every other mode."""
    found = yield from gpus(ID, answers, "compute_mode")
    for node, row in found.items():
        other = {gpu.index: gpu["compute_mode"] for gpu in row if gpu.has("compute_mode")}
        other = {index: mode for index, mode in other.items() if mode != "Default"}
        if other:
            yield fail(ID, node, each(other), expected="Default", fix=f"nvidia-smi -i {','.join(other)} -c 0 (as root)")
        else:
            yield ok(ID, node, "Default")
