"""os.selinux: SELinux is in the same mode on every node.

``/sys/fs/selinux/enforce``, which getenforce(8) reads, holds 1 (enforcing) or 0 (permissive), and is absent where
SELinux is off. No mode is wrong by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import SYSTEM
from provision.checks._host import compared, pairs
from provision.model import Finding

ID = "os.selinux"
LEVEL = 0
TITLE = "SELinux is in the same mode on every node"
PROBE = SYSTEM
WHY = "What is allowed on the others is refused on the node that enforces: 'Permission denied' with right file modes."

_MODES = {"1": "enforcing", "0": "permissive", "off": "off"}


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "set SELINUX= alike in /etc/selinux/config and reboot; for now setenforce 0 (or 1)"
    yield from compared(ID, answers, lambda answer: _MODES.get(pairs(answer).get("selinux", "")), fix=fix)
