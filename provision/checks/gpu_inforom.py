"""gpu.inforom: all GPUs have the same InfoROM, and none is damaged.

nvidia-smi says "WARNING: infoROM is corrupted at gpu 0000:3B:00.0" below its answer (NVIDIA, "GPU Debug Guidelines").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, warn
from provision.checks._nvidia import GPUS, SMI, alike, gpus
from provision.model import Finding

ID = "gpu.inforom"
LEVEL = 0
TITLE = "the InfoROM of every GPU is whole and of one version"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "The InfoROM remembers which rows of memory were replaced: a damaged one lets bad memory be used again."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """WARN for a damaged one, and where the version differs."""
    whole = {}
    for node, answer in answers.items():
        damaged = re.findall(r"(?i)infoROM is corrupted at gpu\s+(\S+)", answer.out + answer.err)
        if damaged:
            said = f"the InfoROM of {', '.join(damaged)} is damaged"
            fix = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; if it stays, have the GPU replaced"
            yield warn(ID, node, said, expected="a whole InfoROM", fix=fix)
        else:
            whole[node] = answer
    found = yield from gpus(ID, whole, "inforom.img")
    nodes = {node: {gpu.index: gpu["inforom.img"] for gpu in row} for node, row in found.items()}
    fix = "bring the GPUs to one firmware with the server vendor's tool at the next maintenance"
    yield from alike(ID, nodes, what="InfoROM", fix=fix, verdict="WARN")
