"""Network: the simple checks."""

import re

from provision.checks.kit import Answer, Judgement, each_node, fail, ok, unknown, warn
from provision.checks.kit.network import as_address

_BOND_PROBE = """\
for cc_path in /proc/net/bonding/*; do
  [ -f "$cc_path" ] || continue
  echo "bond ${cc_path##*/}"
  cat "$cc_path"
done
echo end
"""


@each_node(
    "net.bond",
    "every port of a bond is up",
    probe=_BOND_PROBE,
    why="A bond with a dead port goes on with a part of its speed, and one cable more takes the node away.",
)
def bond(answer: Answer) -> Judgement:
    """WARN where a port's MII status is not up, or the bond has none.

    The format of /proc/net/bonding/* is that of the kernel's bonding driver (Documentation/networking/bonding.rst).
    """
    observed, ports = [], 0
    for part in re.split(r"^bond ", answer.out, flags=re.MULTILINE)[1:]:
        bond = part.split()[0]
        found = re.findall(r"^Slave Interface: (\S+)\nMII Status: (.+)$", part, re.MULTILINE)
        ports += len(found)
        observed += [f"{port} of {bond} is {state}" for port, state in found if state != "up"]
        observed += [f"{bond} has no port"] if not found else []
    if "end" not in answer.lines:
        return unknown(f"its bonds were not read to the end: {answer.err or 'no answer'}")
    if observed:
        fix = "look at its cable and switch port: cat /proc/net/bonding/*"
        return warn("; ".join(observed), fix=fix)
    return ok(f"{ports} ports up" if ports else "no bond")


_HOSTNAME_PROBE = """\
echo "name $(uname -n)"
command -v getent >/dev/null 2>&1 || { echo "no getent"; exit 0; }
getent ahostsv4 "$(uname -n)" | while read -r cc_address _; do echo "address $cc_address"; done
"""


@each_node(
    "net.hostname",
    "the node's own name is an address that others reach",
    probe=_HOSTNAME_PROBE,
    why=(
        "Gloo and some launchers tell the others where they listen by looking their own name up: a 127 address hangs "
        "them."
    ),
)
def hostname(node: str, answer: Answer) -> Judgement:
    """FAIL for a loopback address, WARN where the name has none.

    Debian's installer writes ``127.0.1.1 HOSTNAME`` into /etc/hosts (Debian Reference, 5.1.1).
    """
    host = next((line.split()[1] for line in answer.lines if line.startswith("name ")), "")
    found = list(dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("address ")))
    loop = [text for text in found if (address := as_address(text)) and address.is_loopback]
    fix = f"write `ADDRESS {host}` with its address on the network into /etc/hosts, in place of 127.0.1.1"
    if "no getent" in answer.lines or not host:
        return unknown("getent is not installed", fix=f"install getent on {node}")
    if loop:
        return fail(f"{host} is {loop[0]}", fix=fix)
    if not found:
        return warn(f"{host} has no address", fix=fix)
    return ok(f"{host} is {', '.join(found)}")


_LOOPBACK_PROBE = """\
IFS= read -r cc_flags </sys/class/net/lo/flags && echo "flags $cc_flags"
command -v getent >/dev/null 2>&1 || { echo "no getent"; exit 0; }
getent ahosts localhost | while read -r cc_address _; do echo "localhost $cc_address"; done
"""


@each_node(
    "net.loopback",
    "lo is up and localhost is a loopback address",
    probe=_LOOPBACK_PROBE,
    why="DeepSpeed, torchrun on a single node and data loaders talk to themselves over localhost: they hang or refuse.",
)
def loopback(node: str, answer: Answer) -> Judgement:
    """FAIL where lo is down, or where the name means nothing or something else."""
    flags = next((line.split()[1] for line in answer.lines if line.startswith("flags ")), "")
    found = list(dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("localhost ")))
    wrong = [text for text in found if not ((address := as_address(text)) and address.is_loopback)]
    if not re.fullmatch("0x[0-9a-f]{1,16}", flags):
        return unknown("the state of lo cannot be read")
    if not int(flags, 16) & 1:
        return fail("lo is down", fix="ip link set lo up")
    if "no getent" in answer.lines:
        return unknown("getent is not installed", fix=f"install getent on {node}")
    if not found or wrong:
        observed = f"localhost is {', '.join(wrong)}" if wrong else "localhost has no address"
        return fail(observed, fix="write `127.0.0.1 localhost` into /etc/hosts")
    return ok(f"localhost is {', '.join(found)}")
