"""clock.sync: Whether chrony follows a clock.

``chronyc -c -n tracking``: one line of comma-separated fields, of which the third is the stratum, the fifth the offset
in seconds and the last the leap status (chronyc(1); the order is that of ``process_cmd_tracking`` in its client.c).
"""

import re

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown, warn
from provision.checks.kit.measures import span

TOOL = "chronyc"
TITLE = "chrony follows a clock"
WHY = "A clock without a source drifts by seconds a day, differently on each node."
PROBE = "chronyc -c -n tracking 2>&1"
LIMITS = {"offset_ms": 10, "stratum": 14}  # 15 is as far as NTP counts; orphans of a site begin at 10


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL without a source, WARN for a large offset; UNKNOWN where no chronyd answers."""
    fix = "chronyc -n sources; services: chrony: {} in the inventory sets it up"
    for name, answer in answers.items():
        fields = answer.out.strip().split(",")
        if len(fields) != 14 or not fields[2].isdecimal() or not re.fullmatch(r"-?\d+\.\d+", fields[4]):
            observed = answer.out.strip() or answer.err or "no answer"
            yield name, unknown(f"chronyc: {observed[:120]}", fix="systemctl enable --now chrony")
            continue
        stratum, offset, leap = int(fields[2]), float(fields[4]), fields[13]
        if leap == "Not synchronised":
            yield name, fail("not synchronised", fix=fix)
        elif stratum > seen.limits["stratum"]:
            yield name, warn(f"stratum {stratum}", expected=f"at most {seen.limits['stratum']:g}", fix=fix)
        elif abs(offset) * 1e3 > seen.limits["offset_ms"]:
            fix = "wait until chrony has caught up, or before a training: chronyc makestep"
            observed = f"{span(offset)} off {fields[1] or 'its clock'}"
            yield name, warn(observed, expected=f"below {seen.limits['offset_ms']:g} ms", fix=fix)
        else:
            yield name, ok(f"stratum {stratum}, {span(abs(offset))} off")
