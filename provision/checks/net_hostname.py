"""net.hostname: Whether a node's own name means an address that others can reach.

Debian's installer writes ``127.0.1.1 HOSTNAME`` into /etc/hosts (Debian Reference, 5.1.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown, warn
from provision.checks._routing import as_address
from provision.model import Finding

ID = "net.hostname"
LEVEL = 0
TITLE = "the node's own name is an address that others reach"
WHY = (
    "Gloo and some launchers tell the others where they listen by looking their own name up: a 127 address hangs them."
)
PROBE = """\
echo "name $(uname -n)"
command -v getent >/dev/null 2>&1 || { echo "no getent"; exit 0; }
getent ahostsv4 "$(uname -n)" | while read -r cc_address _; do echo "address $cc_address"; done
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for a loopback address, WARN where the name has none."""
    for name, answer in answers.items():
        host = next((line.split()[1] for line in answer.lines if line.startswith("name ")), "")
        found = list(dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("address ")))
        loop = [text for text in found if (address := as_address(text)) and address.is_loopback]
        fix = f"write `ADDRESS {host}` with its address on the network into /etc/hosts, in place of 127.0.1.1"
        if "no getent" in answer.lines or not host:
            yield unknown(ID, name, "getent is not installed", fix=f"install getent on {name}")
        elif loop:
            yield fail(ID, name, f"{host} is {loop[0]}", expected=TITLE, fix=fix)
        elif not found:
            yield warn(ID, name, f"{host} has no address", expected=TITLE, fix=fix)
        else:
            yield ok(ID, name, f"{host} is {', '.join(found)}")
