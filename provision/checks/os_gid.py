"""os.gid: the training user's main group has the same number on every node.

NFS with ``sec=sys`` sends the numbers of the group and of at most 16 further ones (RFC 5531, appendix A).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import SYSTEM
from provision.checks._host import compared, number, pairs
from provision.model import Finding

ID = "os.gid"
LEVEL = 0
TITLE = "the training user's main group has the same number on every node"
PROBE = SYSTEM
WHY = "Files in a shared folder that only the group may read cannot be read on the odd node."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "groupmod -g GID GROUP as root when nothing of the user runs, then chgrp the home"
    yield from compared(ID, answers, lambda answer: number(pairs(answer).get("Gid")), fix=fix, what="gid")
