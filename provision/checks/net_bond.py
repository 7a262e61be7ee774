"""net.bond: Whether all ports of a bond are up.

The format of /proc/net/bonding/* is that of the kernel's bonding driver (Documentation/networking/bonding.rst).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.model import Finding

ID = "net.bond"
LEVEL = 0
TITLE = "every port of a bond is up"
WHY = "A bond with a dead port goes on with a part of its speed, and one cable more takes the node away."
PROBE = """\
for cc_path in /proc/net/bonding/*; do
  [ -f "$cc_path" ] || continue
  echo "bond ${cc_path##*/}"
  cat "$cc_path"
done
echo end
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where a port's MII status is not up, or the bond has none."""
    for name, answer in answers.items():
        said, ports = [], 0
        for part in re.split(r"^bond ", answer.out, flags=re.MULTILINE)[1:]:
            bond = part.split()[0]
            found = re.findall(r"^Slave Interface: (\S+)\nMII Status: (.+)$", part, re.MULTILINE)
            ports += len(found)
            said += [f"{port} of {bond} is {state}" for port, state in found if state != "up"]
            said += [f"{bond} has no port"] if not found else []
        if "end" not in answer.lines:
            yield unknown(ID, name, f"its bonds were not read to the end: {answer.err or 'no answer'}")
        elif said:
            fix = "look at its cable and switch port: cat /proc/net/bonding/*"
            yield warn(ID, name, "; ".join(said), expected=TITLE, fix=fix)
        else:
            yield ok(ID, name, f"{ports} ports up" if ports else "no bond")
