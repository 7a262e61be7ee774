"""gpu.eccmode: the GPUs' memory corrects errors (ECC), on all nodes alike.

ECC is expected of the chips with stacked memory, which data centres have; on others it is a choice, but one that all
nodes should have made. Source of the capabilities: NVIDIA, "CUDA GPU Compute Capability".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, warn
from provision.checks._nvidia import GPUS, SMI, Gpu, alike, each, gpus
from provision.model import Finding

ID = "gpu.eccmode"
LEVEL = 0
TITLE = "ECC is on"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Without ECC a flipped bit of memory goes into the weights unseen; where it differs, so does the memory's size."

_STACKED = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")  # P100, V100, A100, H100 and H200, B200, B300
_FIX = "nvidia-smi -e 1 (as root), then reboot"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """WARN where it is off, about to change, or not as on the other nodes."""
    found = yield from gpus(ID, answers, "ecc.mode.current", "ecc.mode.pending", "compute_cap")
    nodes = {}
    for node, row in found.items():
        odd = {gpu.index: said for gpu in row if (said := _odd(gpu))}
        if odd:
            yield warn(ID, node, each(odd), expected="ECC is on", fix=_FIX)
        else:
            nodes[node] = {gpu.index: gpu["ecc.mode.current"] for gpu in row}
    yield from alike(ID, nodes, what="ECC", fix=_FIX, verdict="WARN")


def _odd(gpu: Gpu) -> str:
    now, next_boot = gpu["ecc.mode.current"], gpu["ecc.mode.pending"]
    if gpu.has("ecc.mode.pending") and now != next_boot:
        return f"ECC {now}, {next_boot} after the next reboot"
    return "ECC Disabled" if now == "Disabled" and gpu["compute_cap"] in _STACKED else ""
