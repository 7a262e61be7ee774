"""clock.future: Whether the node's clock is later than what was written there.

A clock that was set back, or begins anew at every start (an empty battery), is earlier than the files of yesterday.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.model import Finding, Node
from provision.render import words

ID = "clock.future"
LEVEL = 0
TITLE = "no file of the node is from the future"
WHY = "The clock was set back or lost its battery: make, Python and logs take what is old for new."
LIMITS = {"future_s": 60}


def probe(seen: Plan, _node: Node) -> str:
    """The times of folders that are written to all the time, then the clock."""
    root = seen.inventory.root
    places = words(("/var/log", "/var/lib", "/run", "/etc", "/root", root, root / "releases", root / "runs"))
    return f'stat -c "%Y %n" -- {places} 2>/dev/null; echo "now $(date +%s)"'


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN where a folder is more than ``future_s`` younger than now."""
    for name, answer in answers.items():
        now = re.search(r"^now (\d+)$", answer.out, re.MULTILINE)
        times = [(int(match[1]), match[2]) for match in re.finditer(r"^(\d+) (/.*)$", answer.out, re.MULTILINE)]
        if not now or not times:
            yield unknown(ID, name, f"neither clock nor files can be read: {answer.err or 'no answer'}")
            continue
        latest, place = max(times)
        ahead = latest - int(now[1])
        if ahead > seen.limits["future_s"]:
            said = f"{place} was written {_span(ahead)} later than the node's clock is now"
            fix = f"date on {name}; set it (chronyc makestep), and hwclock --systohc"
            yield warn(ID, name, said, expected=TITLE, fix=fix)
        else:
            yield ok(ID, name, f"the latest of {len(times)} folders is {_span(-ahead) if ahead < 0 else '0 s'} old")


def _span(seconds: int) -> str:
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    return next((f"{seconds // size} {unit}" for size, unit in units if seconds >= 2 * size), f"{seconds} s")
