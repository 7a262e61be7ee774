"""clock.future: Whether the node's clock is later than what was written there.

A clock that was set back, or restarts at every boot (an empty battery), is earlier than the files of yesterday.
"""

import re
from collections.abc import Mapping

from provision.checks.kit import Answer, Judgement, Plan, ok, unknown, warn
from provision.render import words

TITLE = "no file of the node is from the future"
WHY = "The clock was set back or lost its battery: make, Python and logs take what is old for new."
LIMITS = {"future_s": 60}


def probe(seen: Plan) -> str:
    """The times of folders that are written to all the time, then the clock."""
    root = seen.inventory.root
    places = words(("/var/log", "/var/lib", "/run", "/etc", "/root", root, root / "releases", root / "runs"))
    return f'stat -c "%Y %n" -- {places} 2>/dev/null; echo "now $(date +%s)"'


def judge(node: str, answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """WARN where a folder is more than ``future_s`` younger than now."""
    now = re.search(r"^now (\d+)$", answer.out, re.MULTILINE)
    times = [(int(match[1]), match[2]) for match in re.finditer(r"^(\d+) (/.*)$", answer.out, re.MULTILINE)]
    if not now or not times:
        return unknown(f"neither clock nor files can be read: {answer.err or 'no answer'}")
    latest, place = max(times)
    ahead = latest - int(now[1])
    if ahead > limits["future_s"]:
        observed = f"{place} was written {_span(ahead)} later than the node's clock is now"
        fix = f"date on {node}; set it (chronyc makestep), and hwclock --systohc"
        return warn(observed, fix=fix)
    return ok(f"the latest of {len(times)} folders is {_span(-ahead) if ahead < 0 else '0 s'} old")


def _span(seconds: int) -> str:
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    return next((f"{seconds // size} {unit}" for size, unit in units if seconds >= 2 * size), f"{seconds} s")
