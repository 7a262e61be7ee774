"""gpu.sram: few uncorrected errors of on-chip memory in the GPU's life.

SRAM has no spare rows. Source of the threshold: NVIDIA, "GPU Memory Error Management", RMA policy: more than four in
one bank of memory with parity. The counter is the whole GPU's, so the vendor's field diagnostic decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._nvidia import GPUS, SMI, each, gpus
from provision.model import Finding

ID = "gpu.sram"
LEVEL = 0
TITLE = "no uncorrected error of on-chip memory in the GPU's life"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
LIMITS = {"errors": 4}
WHY = "On-chip memory cannot be repaired: a GPU with such errors ends one run after the other."

_FIELD = "ecc.errors.uncorrected.aggregate.sram"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN from the first on, FAIL above the limit."""
    found = yield from gpus(ID, answers, _FIELD)
    for node, row in found.items():
        errors = {gpu.index: count for gpu in row if (count := gpu.number(_FIELD)) is not None}
        bad = {index: f"{count:.0f} uncorrected SRAM errors" for index, count in errors.items() if count}
        if not bad:
            yield ok(ID, node, "no uncorrected SRAM error" if errors else "these GPUs do not count SRAM errors")
        elif max(errors.values()) > seen.limits["errors"]:
            fix = "have the GPU tested and replaced; nvidia-bug-report.sh makes the report that the vendor asks for"
            yield fail(ID, node, each(bad), expected=f"at most {seen.limits['errors']:.0f}", fix=fix)
        else:
            fix = "run dcgmi diag -r 3 at the next maintenance, and watch whether the number grows"
            yield warn(ID, node, each(bad), expected="none", fix=fix)
