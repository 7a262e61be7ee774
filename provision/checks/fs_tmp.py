"""fs.tmp: the folder for temporary files takes files and has room.

``$TMPDIR``, else /tmp (environ(7)). Python, torch and the compilers put files there; where it is a tmpfs it is memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import GIB, df, human, pairs, unread
from provision.model import Finding

ID = "fs.tmp"
LEVEL = 0
TITLE = "the folder for temporary files takes files and has room"
PROBE = """\
at=${TMPDIR:-/tmp}
echo "at $at"
if file=$(mktemp "$at/clusterctl-check.XXXXXX" 2>&1); then
    rm -f "$file"
    echo "writable yes"
else
    echo "refused $file"
fi
df -Pk "$at" 2>/dev/null
"""
LIMITS = {"free_gib": 2}
WHY = "Python, data loaders and compilers keep files there: 'No usable temporary directory' when a rank starts."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where no file can be made, WARN where it is nearly full."""
    for name, answer in answers.items():
        told = pairs(answer)
        at, room = told.get("at", ""), df(answer)
        if "refused" in told:
            fix = f"free {at}, or make it again: mkdir -p {at} && chmod 1777 {at}"
            yield fail(ID, name, f"{at}: {told['refused'].rpartition(': ')[2]}", expected="it takes files", fix=fix)
        elif "writable" not in told or room is None:
            yield unread(ID, name, answer)
        elif room[1] * 1024 < seen.limits["free_gib"] * GIB:
            said = f"{human(room[1] * 1024)} free in {at}"
            fix = f"see what fills it: du -xhd1 {at}; or set TMPDIR to a larger disk"
            yield warn(ID, name, said, expected=f"at least {seen.limits['free_gib']:g} GiB", fix=fix)
        else:
            yield ok(ID, name, f"{human(room[1] * 1024)} free in {at}")
