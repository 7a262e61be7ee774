"""os.kernel: every node runs the same kernel.

``uname -r``, the release that modules are built for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import SYSTEM
from provision.checks._host import compared, pairs
from provision.model import Finding

ID = "os.kernel"
LEVEL = 0
TITLE = "every node runs the same kernel"
PROBE = SYSTEM
WHY = "Drivers, NFS and RDMA behave differently from kernel to kernel: faults appear on one node and are hard to find."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """The nodes compared."""
    fix = "install and boot the usual kernel, and hold it: apt-mark hold 'linux-image-*' (dnf versionlock add kernel)"
    yield from compared(ID, answers, lambda answer: pairs(answer).get("kernel"), fix=fix)
