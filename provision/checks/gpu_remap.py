"""gpu.remap: no row of the GPUs' memory waits to be replaced, and none could not be.

Since A100 a bad row of memory is replaced by a spare one at the next reset. Source: NVIDIA, "GPU Memory Error
Management", RMA policy: a GPU is to be replaced once a row could not be; a bank of memory has spare rows for eight.
"""

import re
from collections.abc import Mapping

from provision.checks.kit import Answer, Judgement, fail, ok, warn
from provision.checks.kit.gpu import SMI, answer_lines, each, unanswered

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


def judge(node: str, answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """FAIL for a row that waits and one that could not be replaced, WARN for many that were."""
    lines = answer_lines(answer)
    if answer.rc or not lines or not all(_LINE.fullmatch(line) or _NOT_THERE.fullmatch(line) for line in lines):
        return unanswered(node, answer)
    return _judge(lines, limits["uncorrectable_rows"])


def _judge(lines: tuple[str, ...], most: float) -> Judgement:
    rows = [(index, row) for index, line in enumerate(lines) if (row := _LINE.fullmatch(line))]
    failed = {str(index): "a row could not be replaced" for index, row in rows if row[2].title() in _YES}
    waiting = {str(index): "a row waits to be replaced" for index, row in rows if row[1].title() in _YES}
    many = {str(index): f"{row[3]} rows were replaced" for index, row in rows if int(row[3]) > most}
    expected = f"none that waits or failed, at most {most:.0f} replaced after uncorrected errors"
    if failed or waiting:
        fix = _REPLACE if failed else _REBOOT
        return fail(each(waiting | failed), expected=expected, fix=fix)
    if many:
        return warn(each(many), expected=expected, fix="watch it: if more come, have the GPU replaced")
    return ok("no row waits or failed" if rows else "these GPUs do not replace rows")
