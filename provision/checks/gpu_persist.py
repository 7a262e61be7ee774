"""gpu.persist: persistence mode keeps the driver's state between programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.persist"
LEVEL = 0
TITLE = "persistence mode is on"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Without it the driver shuts GPUs down between programs: every start takes seconds longer, and settings are lost."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """WARN where it is off."""
    found = yield from gpus(ID, answers, "persistence_mode")
    for node, row in found.items():
        off = {gpu.index: gpu["persistence_mode"] for gpu in row if gpu["persistence_mode"] == "Disabled"}
        if off:
            fix = "systemctl enable --now nvidia-persistenced (or, until the next boot, nvidia-smi -pm 1)"
            yield warn(ID, node, each(off), expected="Enabled", fix=fix)
        else:
            yield ok(ID, node, each({gpu.index: gpu["persistence_mode"] for gpu in row}))
