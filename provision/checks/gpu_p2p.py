"""gpu.p2p: the GPUs of a node read one another's memory.

Words of ``nvidia-smi topo -p2p r`` (OK, CNS, GNS, TNS, NS, U): its own legend; seen with driver 580.159.04. PCIe cards
may be built so that they cannot; GPUs on NVLink (SXM boards) always can.
"""

from provision.checks.kit import Answers, Judgement, Judgements, ok
from provision.checks.kit.gpu import SMI, Matrix, matrix, unanswered

TITLE = "the GPUs of a node read one another's memory"
TOOL = SMI
TIMEOUT = 20.0
PROBE = """\
nvidia-smi topo -p2p r
rc=$?
cat /proc/driver/nvidia/gpus/*/information 2>/dev/null | sed -n 's/^Model:[[:space:]]*/model /p'
exit $rc
"""
WHY = "Without it NCCL copies everything between GPUs through the host's memory, or hangs where the IOMMU interferes."

_BOARDS = ("SXM", "HBM3", "H200", "H20", "B200", "B300", "GB200", "GB300")  # in names of GPUs that are on NVLink boards
_WORDS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "U": "unknown",
    "DR": "switched off in the driver's registry",
}
_FIX = "switch IOMMU and ACS off in the BIOS (or boot with iommu=pt); on NVLink boards see gpu.fm and gpu.nvlink"


def judge(answers: Answers) -> Judgements:
    """FAIL where it does not work on an NVLink board or works on other nodes, else WARN."""
    found: dict[str, Matrix] = {}
    for node, answer in answers.items():
        cells = matrix(answer.out)
        if cells:
            found[node] = cells
        elif not answer.rc and "GPU0" in answer.out:
            yield node, ok("one GPU")
        else:
            yield node, unanswered(node, answer)
    bad = {
        node: {pair: observed for pair, observed in cells.items() if observed != "OK"} for node, cells in found.items()
    }
    for node, pairs in bad.items():
        if not pairs:
            yield node, ok("all pairs can")
            continue
        models = [line for line in answers[node].lines if line.startswith("model ")]
        board = any(word in line for line in models for word in _BOARDS)
        elsewhere = any(not others for others in bad.values())
        observed = f"{len(pairs)} of {len(found[node])} pairs cannot, {_which(pairs)}"
        yield node, Judgement("FAIL" if board or elsewhere else "WARN", observed, expected="all pairs can", fix=_FIX)


def _which(pairs: Matrix) -> str:
    (row, column), word = next(iter(pairs.items()))
    return f"such as {row} and {column}: {_WORDS.get(word, word)}"
