"""gpu.pcie: every GPU uses all lanes of its PCIe slot, of the same generation everywhere.

The current generation says nothing: it drops while a GPU idles. The highest one is what GPU and slot agree on.
"""

from provision.checks.kit import Answers, Judgements, fail
from provision.checks.kit.gpu import GPUS, SMI, Gpu, alike, each, gpus

TITLE = "every GPU uses all lanes of its PCIe slot"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Half the lanes are half the speed between GPU, memory and network: every step waits for that one GPU."

_NOW, _MOST, _GENERATION = "pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max"


def judge(answers: Answers) -> Judgements:
    """FAIL for fewer lanes than there are, WARN where the highest generation differs."""
    found = yield from gpus(answers, _NOW, _MOST, _GENERATION)
    nodes = {}
    for node, row in found.items():
        narrow = {gpu.index: f"{gpu[_NOW]} of {gpu[_MOST]} lanes" for gpu in row if _narrow(gpu)}
        if narrow:
            fix = "power off and reseat the GPU, its riser and cables; then look at the slot's setting in the BIOS"
            yield node, fail(each(narrow), expected="all lanes", fix=fix)
        else:
            nodes[node] = {gpu.index: f"x{gpu[_NOW]}, generation {gpu[_GENERATION]}" for gpu in row}
    fix = "compare the BIOS settings of the PCIe slots, and the risers"
    yield from alike(nodes, noun="PCIe", fix=fix, verdict="WARN")


def _narrow(gpu: Gpu) -> bool:
    now, most = gpu.number(_NOW), gpu.number(_MOST)
    return now is not None and most is not None and now < most
