"""os.uid: the training user has the same number on every node.

NFS with ``sec=sys`` knows users by number only (nfs(5)); names do not travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import SYSTEM
from provision.checks._host import compared, number, pairs
from provision.checks.kit.mounts import shares
from provision.model import Finding

ID = "os.uid"
LEVEL = 0
TITLE = "the training user has the same number on every node"
PROBE = SYSTEM
WHY = "What one node writes to a shared folder another cannot read: checkpoints fail with 'Permission denied'."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where nodes share a folder, else WARN."""
    verdict = "FAIL" if shares(seen) else "WARN"
    fix = "usermod -u UID USER as root when nothing of the user runs, then chown the home"
    yield from compared(
        ID, answers, lambda answer: number(pairs(answer).get("Uid")), fix=fix, what="uid", verdict=verdict
    )
