"""mem.available: most of the memory is free to use.

``MemAvailable`` of /proc/meminfo estimates what programs can get without swapping (proc_meminfo(5)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._facts import MEMORY
from provision.checks._host import human, kib, pairs, unread
from provision.model import Finding

ID = "mem.available"
LEVEL = 0
TITLE = "most of the memory is free to use"
PROBE = MEMORY
LIMITS = {"free_percent": 50, "free_percent_least": 10}
WHY = "Something else holds the memory: loading the model or saving a checkpoint is killed for lack of it."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Two thresholds of what is free."""
    for name, answer in answers.items():
        told = pairs(answer)
        total, free = kib(told.get("MemTotal")), kib(told.get("MemAvailable"))
        if not total or free is None:
            yield unread(ID, name, answer)
            continue
        share = 100 * free / total
        said = f"{human(free)} of {human(total)} free ({share:.0f} %)"
        if share >= seen.limits["free_percent"]:
            yield ok(ID, name, said)
            continue
        verdict = warn if share >= seen.limits["free_percent_least"] else fail
        fix = "see who holds it: ps -eo pid,user,rss,args --sort=-rss | head"
        yield verdict(ID, name, said, expected=f"at least {seen.limits['free_percent']:g} % free", fix=fix)
