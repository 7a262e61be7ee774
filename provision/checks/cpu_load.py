"""cpu.load: nobody else computes on the node.

The first figure of /proc/loadavg is how many tasks ran or waited for a disk, averaged over a minute (proc_loadavg(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import PROCESSORS
from provision.checks._host import cpus, pairs, unread
from provision.model import Finding

ID = "cpu.load"
LEVEL = 0
TITLE = "nobody else computes on the node"
PROBE = PROCESSORS
LIMITS = {"busy_percent": 50}
WHY = "Another job on one node slows every node down: all wait for the slowest in every step."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN where the load is a large part of the processors."""
    for name, answer in answers.items():
        told = pairs(answer)
        load, count = re.match(r"[0-9]+\.[0-9]+", told.get("load", "")), cpus(told.get("online"))
        if load is None or not count:
            yield unread(ID, name, answer)
            continue
        said = f"load {load[0]} on {count} CPUs"
        if 100 * float(load[0]) <= seen.limits["busy_percent"] * count:
            yield ok(ID, name, said)
            continue
        expected = f"at most {seen.limits['busy_percent'] * count / 100:g}"
        fix = "see who computes there: ps -eo pid,user,pcpu,stat,args --sort=-pcpu | head"
        yield warn(ID, name, said, expected=expected, fix=fix)
