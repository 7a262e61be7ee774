"""mem.hugepages: no memory is set aside as huge pages.

``Hugetlb`` of /proc/meminfo is all memory in huge pages of every size; older kernels (before 4.20) tell only
``HugePages_Total`` of the default size (Documentation/admin-guide/mm/hugetlbpage.rst).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import MEMORY
from provision.checks._host import GIB, human, kib, number, pairs, unread
from provision.model import Finding

ID = "mem.hugepages"
LEVEL = 0
TITLE = "no memory is set aside as huge pages"
PROBE = MEMORY
LIMITS = {"reserved_gib": 0}
WHY = "Reserved huge pages are memory that no training can use: it runs out although the machine seems large enough."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN above what the inventory allows."""
    for name, answer in answers.items():
        told = pairs(answer)
        count, each = number(told.get("HugePages_Total")), kib(told.get("Hugepagesize"))
        reserved = kib(told.get("Hugetlb"))
        if reserved is None and count is not None and each is not None:
            reserved = count * each
        if reserved is None:
            yield unread(ID, name, answer)
        elif reserved <= seen.limits["reserved_gib"] * GIB:
            yield ok(ID, name, f"{human(reserved)} in huge pages")
        else:
            expected = f"at most {seen.limits['reserved_gib']:g} GiB"
            fix = "sysctl -w vm.nr_hugepages=0, and take it out of /etc/sysctl.d and the kernel's command line"
            yield warn(ID, name, f"{human(reserved)} in huge pages", expected=expected, fix=fix)
