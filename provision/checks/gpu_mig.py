"""gpu.mig: GPUs are not divided into instances (MIG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.mig"
LEVEL = 0
TITLE = "no GPU is divided into MIG instances"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "A process sees one MIG instance only, and NCCL does not work between instances: ranks find no GPU."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL where MIG is on; GPUs that cannot be divided are fine."""
    found = yield from gpus(ID, answers, "mig.mode.current")
    for node, row in found.items():
        on = {gpu.index: "MIG is on" for gpu in row if gpu["mig.mode.current"] == "Enabled"}
        if on:
            fix = f"nvidia-smi -i {','.join(on)} -mig 0 (as root, with nothing running; it may ask for a reset)"
            yield fail(ID, node, each(on), expected="MIG is off", fix=fix)
        else:
            yield ok(ID, node, "MIG is off")
