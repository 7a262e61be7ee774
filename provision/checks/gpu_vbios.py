"""gpu.vbios: all GPUs have the same VBIOS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._nvidia import GPUS, SMI, alike, gpus
from provision.model import Finding

ID = "gpu.vbios"
LEVEL = 0
TITLE = "all GPUs have the same VBIOS"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
WHY = "Another VBIOS may mean other clocks and power limits: one GPU that is slower makes all others wait."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """WARN where the version differs."""
    found = yield from gpus(ID, answers, "vbios_version")
    nodes = {node: {gpu.index: gpu["vbios_version"] for gpu in row} for node, row in found.items()}
    fix = "bring the GPUs to one firmware with the server vendor's tool at the next maintenance"
    yield from alike(ID, nodes, what="VBIOS", fix=fix, verdict="WARN")
