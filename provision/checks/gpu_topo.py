"""gpu.topo: GPUs and network cards are connected in the same way on all nodes.

Format and words of ``nvidia-smi topo -m`` (NV18, PIX, SYS, ...): its own legend; seen with driver 580.159.04.
"""

from collections import Counter

from provision.checks.kit import Answers, Judgements, groups, majority, ok, warn
from provision.checks.kit.gpu import SMI, Matrix, matrix, unanswered
from provision.inventory import fold

TITLE = "GPUs and network cards are connected alike on all nodes"
TOOL = SMI
TIMEOUT = 20.0
PROBE = "nvidia-smi topo -m"
WHY = "NCCL plans its rings for the slowest connection: a GPU behind another socket slows all nodes down."

_SHOWN = 4  # connections that are named
_FIX = "compare BIOS, slots and cables of the two nodes: lspci -tv; NVLink: the checks gpu.nvlink and gpu.fm"


def judge(answers: Answers) -> Judgements:
    """WARN where a connection is not as on most nodes."""
    found: dict[str, Matrix] = {}
    for node, answer in answers.items():
        cells = matrix(answer.out)
        if cells:
            found[node] = cells
        elif not answer.rc and "GPU0" in answer.out:
            yield node, ok("one GPU")
        else:
            yield node, unanswered(node, answer)
    frozen = {node: tuple(sorted(cells.items())) for node, cells in found.items()}
    usual = majority(frozen)
    for node, cells in found.items():
        kinds = Counter(cells.values())
        if usual is not None and frozen[node] == usual:
            yield node, ok(", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())))
            continue
        other = usual or next(value for value in groups(frozen) if value != frozen[node])
        who = "most nodes" if usual else fold(groups(frozen)[other])
        yield node, warn(_difference(cells, dict(other), who), expected=f"as {who}", fix=_FIX)


def _difference(mine: Matrix, other: Matrix, who: str) -> str:
    """``GPU0-GPU1 SYS (most nodes: NV18)``, for a few connections."""
    pairs = [pair for pair in {**mine, **other} if mine.get(pair) != other.get(pair)]
    pairs = [pair for pair in pairs if pair[::-1] not in pairs or pair <= pair[::-1]]
    shown = [
        f"{row}-{column} {mine.get((row, column), 'is missing')} ({who}: {other.get((row, column), 'not there')})"
        for row, column in pairs[:_SHOWN]
    ]
    more = len(pairs) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])])
