"""gpu.same: all GPUs are of one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._nvidia import GPUS, SMI, alike, gpus
from provision.model import Finding

ID = "gpu.same"
LEVEL = 0
TITLE = "all GPUs are of one model"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Ranks wait for the slowest GPU at every step, and a batch that fits one model may not fit another."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL where name or compute capability differ."""
    found = yield from gpus(ID, answers, "name", "compute_cap")
    nodes = {
        node: {gpu.index: f"{gpu['name']} (compute capability {gpu['compute_cap']})" for gpu in row}
        for node, row in found.items()
    }
    fix = "leave the node out (--exclude), or train on nodes with equal GPUs"
    yield from alike(ID, nodes, what="", fix=fix, verdict="FAIL")
