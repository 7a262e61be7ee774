"""gpu.inforom: all GPUs have the same InfoROM, and none is damaged.

nvidia-smi says "WARNING: infoROM is corrupted at gpu 0000:3B:00.0" below its answer (NVIDIA, "GPU Debug Guidelines").
"""

import re

from provision.checks.kit import Answers, Judgements, warn
from provision.checks.kit.gpu import GPUS, SMI, alike, gpus

TITLE = "the InfoROM of every GPU is whole and of one version"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "The InfoROM remembers which rows of memory were replaced: a damaged one lets bad memory be used again."


def judge(answers: Answers) -> Judgements:
    """WARN for a damaged one, and where the version differs."""
    whole = {}
    for node, answer in answers.items():
        damaged = re.findall(r"(?i)infoROM is corrupted at gpu\s+(\S+)", answer.out + answer.err)
        if damaged:
            observed = f"the InfoROM of {', '.join(damaged)} is damaged"
            fix = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; if it stays, have the GPU replaced"
            yield node, warn(observed, expected="a whole InfoROM", fix=fix)
        else:
            whole[node] = answer
    found = yield from gpus(whole, "inforom.img")
    nodes = {node: {gpu.index: gpu["inforom.img"] for gpu in row} for node, row in found.items()}
    fix = "bring the GPUs to one firmware with the server vendor's tool at the next maintenance"
    yield from alike(nodes, noun="InfoROM", fix=fix, verdict="WARN")
