"""net.loopback: Whether localhost is the node itself: lo is up and the name has a loopback address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown
from provision.checks._routing import as_address
from provision.model import Finding

ID = "net.loopback"
LEVEL = 0
TITLE = "lo is up and localhost is a loopback address"
WHY = "DeepSpeed, torchrun on a single node and data loaders talk to themselves over localhost: they hang or refuse."
PROBE = """\
IFS= read -r cc_flags </sys/class/net/lo/flags && echo "flags $cc_flags"
command -v getent >/dev/null 2>&1 || { echo "no getent"; exit 0; }
getent ahosts localhost | while read -r cc_address _; do echo "localhost $cc_address"; done
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL where lo is down, or where the name means nothing or something else."""
    for name, answer in answers.items():
        flags = next((line.split()[1] for line in answer.lines if line.startswith("flags ")), "")
        found = list(dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("localhost ")))
        wrong = [text for text in found if not ((address := as_address(text)) and address.is_loopback)]
        if not re.fullmatch("0x[0-9a-f]{1,16}", flags):
            yield unknown(ID, name, "the state of lo cannot be read")
        elif not int(flags, 16) & 1:
            yield fail(ID, name, "lo is down", expected=TITLE, fix="ip link set lo up")
        elif "no getent" in answer.lines:
            yield unknown(ID, name, "getent is not installed", fix=f"install getent on {name}")
        elif not found or wrong:
            said = f"localhost is {', '.join(wrong)}" if wrong else "localhost has no address"
            yield fail(ID, name, said, expected=TITLE, fix="write `127.0.0.1 localhost` into /etc/hosts")
        else:
            yield ok(ID, name, f"localhost is {', '.join(found)}")
