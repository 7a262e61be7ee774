"""mem.total: every node has as much memory as the others.

``MemTotal`` of /proc/meminfo is what the kernel may use; equal machines differ by less than 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._facts import MEMORY
from provision.checks._host import human, kib, pairs, unread
from provision.checks._judging import close, odd
from provision.model import Finding

ID = "mem.total"
LEVEL = 0
TITLE = "every node has as much memory as the others"
PROBE = MEMORY
LIMITS = {"differ_percent": 5}
WHY = (
    "A memory module that fell out leaves a node with less: offloading and data loaders run out of memory there first."
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """The nodes' sizes compared, within some percent."""
    sizes: dict[str, float] = {}
    for name, answer in answers.items():
        size = kib(pairs(answer).get("MemTotal"))
        if size is None:
            yield unread(ID, name, answer)
        else:
            sizes[name] = size
    fix = "look for a missing module: dmidecode -t memory | grep -E 'Locator|Size'"
    yield from odd(ID, close(sizes, seen.limits["differ_percent"] / 100), fix=fix, show=human)
