"""os.release: every node has the same release of its distribution.

``ID`` and ``VERSION_ID`` of os-release(5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import SYSTEM
from provision.checks._host import compared, pairs
from provision.model import Finding

ID = "os.release"
LEVEL = 0
TITLE = "every node has the same release of its distribution"
PROBE = SYSTEM
WHY = "Another release has another glibc and other packages: what works on the other nodes fails on the odd one."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "install the usual release on the odd node, or leave it out (--exclude)"
    yield from compared(ID, answers, lambda answer: pairs(answer).get("release"), fix=fix)
