"""mem.thp: transparent huge pages are set alike on every node.

The word in brackets of ``/sys/kernel/mm/transparent_hugepage/enabled`` (Documentation/admin-guide/mm/transhuge.rst).
Which value is best depends on the work; nodes that differ are never right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import MEMORY
from provision.checks._host import compared
from provision.model import Finding

ID = "mem.thp"
LEVEL = 0
TITLE = "transparent huge pages are set alike on every node"
PROBE = MEMORY
WHY = "Copies on the host run at another speed on the odd node, and all others wait for it in every step."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "write the usual value to /sys/kernel/mm/transparent_hugepage/enabled, and to the kernel's command line"
    yield from compared(ID, answers, _chosen, fix=fix)


def _chosen(answer: Answer) -> str | None:
    found = re.search(r"\[([a-z]+)\]", answer.out)
    return found[1] if found else None
