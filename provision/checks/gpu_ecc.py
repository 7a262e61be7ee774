"""gpu.ecc: no uncorrected memory error since the driver was loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.ecc"
LEVEL = 0
TITLE = "no uncorrected memory error since the driver was loaded"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "An uncorrected error ends the process that meets it; where there was one, the next is likely."

_FIELD = "ecc.errors.uncorrected.volatile.total"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for every one: the memory is repaired when the GPU is reset."""
    found = yield from gpus(ID, answers, _FIELD)
    for node, row in found.items():
        errors = {gpu.index: count for gpu in row if (count := gpu.number(_FIELD)) is not None}
        bad = {index: f"{count:.0f} uncorrected errors" for index, count in errors.items() if count}
        if bad:
            fix = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot: bad rows are replaced; else replace the GPU"
            yield fail(ID, node, each(bad), expected="0 uncorrected errors", fix=fix)
        else:
            yield ok(ID, node, "no uncorrected error" if errors else "these GPUs have no ECC")
