"""os.taint: the kernel has met no fault since the node started.

Bits of /proc/sys/kernel/tainted (Documentation/admin-guide/tainted-kernels.rst): 4 a machine check, 5 a bad page, 7 an
oops, 14 a soft lockup. That a driver is proprietary, unsigned or built out of tree (0, 12, 13) is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._facts import SYSTEM
from provision.checks._host import number, pairs, unread
from provision.model import Finding

ID = "os.taint"
LEVEL = 0
TITLE = "the kernel has met no fault since the node started"
PROBE = SYSTEM
WHY = "After an oops, a machine check or a lockup the node may hang or corrupt data at any moment."

_FAULTS = {4: "a machine check", 5: "a bad page", 7: "an oops", 14: "a soft lockup"}


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL with what the kernel met."""
    for name, answer in answers.items():
        taint = number(pairs(answer).get("taint"))
        if taint is None:
            yield unread(ID, name, answer)
            continue
        met = [what for bit, what in _FAULTS.items() if taint >> bit & 1]
        if met:
            fix = "read journalctl -k for its cause, and reboot the node"
            yield fail(ID, name, f"{' and '.join(met)} (taint {taint})", expected="none", fix=fix)
        else:
            yield ok(ID, name, f"no fault (taint {taint})" if taint else "no fault")
