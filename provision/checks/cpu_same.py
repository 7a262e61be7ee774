"""cpu.same: every node has the same model of processor.

``model name`` of /proc/cpuinfo; on ARM, which has none, ``CPU part`` (arch/arm64/kernel/cpuinfo.c).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import PROCESSORS
from provision.checks._host import compared
from provision.model import Finding

ID = "cpu.same"
LEVEL = 0
TITLE = "every node has the same model of processor"
PROBE = PROCESSORS
WHY = "Code compiled for one processor ends with 'Illegal instruction' on an older one, and the slowest sets the pace."

_NAMES = frozenset({"model name", "CPU implementer", "CPU part"})


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "leave the odd node out (--exclude), or pack for the older processor: pack-env --cpu-baseline"
    yield from compared(ID, answers, _model, fix=fix)


def _model(answer: Answer) -> str | None:
    lines = (line.partition(":") for line in answer.lines)
    return " ".join(value.strip() for key, _, value in lines if key.strip() in _NAMES) or None
