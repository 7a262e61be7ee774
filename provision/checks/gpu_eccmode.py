"""gpu.eccmode: the GPUs' memory corrects errors (ECC), on all nodes alike.

ECC is expected of the chips with stacked memory, which data centres have; on others it is a choice, but one that all
nodes should have made. Source of the capabilities: NVIDIA, "CUDA GPU Compute Capability".
"""

from provision.checks.kit import Answers, Judgements, warn
from provision.checks.kit.gpu import GPUS, SMI, Gpu, alike, each, gpus

TITLE = "ECC is on"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Without ECC a flipped bit of memory goes into the weights unseen; where it differs, so does the memory's size."

_STACKED = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")  # P100, V100, A100, H100 and H200, B200, B300
_FIX = "nvidia-smi -e 1 (as root), then reboot"


def judge(answers: Answers) -> Judgements:
    """WARN where it is off, about to change, or not as on the other nodes."""
    found = yield from gpus(answers, "ecc.mode.current", "ecc.mode.pending", "compute_cap")
    nodes = {}
    for node, row in found.items():
        odd = {gpu.index: observed for gpu in row if (observed := _odd(gpu))}
        if odd:
            yield node, warn(each(odd), expected="ECC is on", fix=_FIX)
        else:
            nodes[node] = {gpu.index: gpu["ecc.mode.current"] for gpu in row}
    yield from alike(nodes, noun="ECC", fix=_FIX, verdict="WARN")


def _odd(gpu: Gpu) -> str:
    now, next_boot = gpu["ecc.mode.current"], gpu["ecc.mode.pending"]
    if gpu.has("ecc.mode.pending") and now != next_boot:
        return f"ECC {now}, {next_boot} after the next reboot"
    return "ECC Disabled" if now == "Disabled" and gpu["compute_cap"] in _STACKED else ""
