"""gpu.remap: no row of the GPUs' memory waits to be replaced, and none could not be.

Since A100 a bad row of memory is replaced by a spare one at the next reset. Source: NVIDIA, "GPU Memory Error
Management", row remapping; more than eight uncorrectable ones: the catalogue of Azure's health checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown
from provision.checks._judging import found_as
from provision.checks._nvidia import SMI, each, trouble
from provision.model import Finding, Verdict

ID = "gpu.remap"
LEVEL = 0
TITLE = "no row of memory waits to be replaced"
TOOL = SMI
TIMEOUT = 20.0
PROBE = (
    "nvidia-smi --query-remapped-rows=remapped_rows.pending,remapped_rows.failure,remapped_rows.uncorrectable "
    "--format=csv,noheader"
)
LIMITS = {"uncorrectable_rows": 8}
WHY = "A row that waits is still in use and gives errors; a GPU without spare rows gives them until it is replaced."

_YES = ("Yes", "1")
_LINE = re.compile(r"(Yes|No|0|1), (Yes|No|0|1), (\d+)\s*", re.IGNORECASE)
_NOT_THERE = re.compile(r"(\[?(N/A|Not Supported)\]?,?\s*){3}")
_REBOOT = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot the node"
_REPLACE = "have the GPU replaced; nvidia-bug-report.sh makes the report that the vendor asks for"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for a row that waits and one that could not be replaced, WARN for many that were."""
    for node, answer in answers.items():
        if answer.out.startswith("No devices were found"):
            yield ok(ID, node, "no GPU")
        elif answer.rc or not all(_LINE.fullmatch(line) or _NOT_THERE.fullmatch(line) for line in answer.lines):
            yield unknown(ID, node, trouble(answer), fix="the check gpu.driver tells more")
        else:
            yield _judge(node, answer, seen.limits["uncorrectable_rows"])


def _judge(node: str, answer: Answer, most: float) -> Finding:
    said: dict[str, str] = {}
    verdict: Verdict = "OK"
    fix = ""
    for index, line in enumerate(answer.lines):
        if not (row := _LINE.fullmatch(line)):
            continue
        pending, failure, count = row[1].title(), row[2].title(), int(row[3])
        if failure in _YES:
            said[str(index)], verdict, fix = "a row could not be replaced", "FAIL", _REPLACE
        elif pending in _YES:
            said[str(index)], verdict, fix = "a row waits to be replaced", "FAIL", fix or _REBOOT
        elif count > most:
            said[str(index)] = f"{count} rows were replaced after uncorrected errors"
            verdict, fix = (
                ("WARN" if verdict == "OK" else verdict),
                fix or "watch it: more of them, and it needs replacing",
            )
    if not said:
        return ok(ID, node, "no row waits or failed")
    return found_as(ID, node, verdict, each(said), expected=f"none, and at most {most:.0f} replaced rows", fix=fix)
