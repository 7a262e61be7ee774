"""Network: the simple checks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from provision.checks.kit import Answer, Judgement, Judgements, each_node, fail, majority, odd, ok, unknown, warn
from provision.checks.kit.network import Link, Network, as_address, carrier_nodes, table

Carriers = Mapping[str, tuple[Network, Link]]

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
    why="A bond with a dead port runs at a part of its speed, and one more lost cable disconnects the node.",
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
        "Gloo and some launchers look their own name up and announce that address to the others: a 127 address "
        "hangs them."
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


# --- the interface that carries the training ---------------------------------------------------------


@carrier_nodes(
    "net.mtu",
    "the same MTU on every node's data interface",
    why="Large packets vanish between nodes whose MTU differs: connections open, then hang with the first tensor.",
)
def mtu(found: Carriers) -> Judgements:
    """FAIL on the nodes that differ."""
    values = {name: link.mtu for name, (_, link) in found.items()}
    interface = {link.name for _, link in found.values()}
    fix = f"ip link set {interface.pop() if len(interface) == 1 else 'INTERFACE'} mtu N, and on the switch"
    yield from odd(values, noun="MTU", fix=fix, verdict="FAIL")


@carrier_nodes(
    "net.duplex",
    "no half-duplex link carries the training",
    why="A half-duplex link is one whose autonegotiation failed: packets collide, and transfers crawl.",
)
def duplex(found: Carriers) -> Judgements:
    """WARN where the interface, or a device below it, is half duplex.

    /sys/class/net/*/duplex: ``full``, ``half``, or ``unknown`` where a driver does not report it (kernel,
    sysfs-class-net).
    """
    for name, (net, link) in found.items():
        half = [each.name for each in (link, *net.devices(link)) if each.duplex == "half"]
        if half:
            fix = f"set switch port and node to autonegotiation: ethtool -s {half[0]} autoneg on"
            yield name, warn(f"{half[0]} is half duplex", fix=fix)
        else:
            yield name, ok(f"{link.name}: {link.duplex if link.duplex != 'unknown' else 'not reported by the driver'}")


@carrier_nodes(
    "net.speed",
    "the same link speed on every node's data interface",
    why="Every step waits for the slowest link: one node at 1 Gbit/s makes the others as slow.",
)
def speed(found: Carriers) -> Judgements:
    """WARN on the nodes that differ; a driver without a speed is a fault only if the other nodes report one.

    /sys/class/net/*/speed, megabits a second; -1 and EINVAL where a driver does not report it, as those of most virtual
    machines.
    """
    # Of the devices below where there are some (a bond's ports), in Mbit/s; 0: not known.
    values = {
        name: link.speed or sum(each.speed or 0 for each in net.devices(link)) for name, (net, link) in found.items()
    }
    if majority(values) is None or any(values.values()):
        fix = "look at the cable, the transceiver and autonegotiation: ethtool INTERFACE"
        yield from odd(values, noun="link speed", show=_speed, fix=fix)
        return
    for name in values:
        yield name, ok(f"the driver of {found[name][1].name} reports no speed")


def _speed(speed: int) -> str:
    if not speed:
        return "not reported by the driver"
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"


@carrier_nodes(
    "net.errors",
    "the data interface has no transmission errors and keeps its carrier",
    # Packets: a healthy link has a bit error rate below 1e-12 (IEEE 802.3), far below one packet in a million. A link
    # goes down once or twice while a machine starts.
    limits={"errors_ppm": 1.0, "carrier_losses": 5},
    why="Every lost packet stalls all ranks until it is sent again; a link that goes down ends the training.",
)
def errors(found: Carriers, answers: Mapping[str, Answer], limits: Mapping[str, float]) -> Judgements:
    """WARN where errors are more than ``errors_ppm`` of the packets, or the carrier went ``carrier_losses`` times.

    Counters since the driver was loaded: /sys/class/net/*/statistics and carrier_down_count (kernel, sysfs-class-net).
    """
    for name, (net, link) in found.items():
        rows = table(answers[name], "count").items()
        counts = {
            each: [int(word) for word in row]
            for each, row in rows
            if len(row) == 6 and all(word.isdecimal() for word in row)
        }
        watched = dict.fromkeys(each.name for each in (link, *net.devices(link)))
        if not counts.keys() & watched.keys():
            yield name, unknown(f"{link.name} has no counters")
            continue
        observed = [text for each in watched if each in counts and (text := _bad(each, counts[each], limits))]
        if observed:
            fix = f"reseat or replace the cable, then look again: ip -s link show {link.name}"
            yield name, warn("; ".join(observed), fix=fix)
        else:
            packets, wrong = (sum(sum(counts[each][at]) for each in watched if each in counts) for at in _PARTS)
            yield name, ok(f"{wrong} errors in {packets} packets")


_PARTS = (slice(1, 3), slice(3, 5))  # of the counters: packets, errors


def _bad(name: str, counts: list[int], limits: Mapping[str, float]) -> str:
    down, received, sent, *errors = counts
    wrong, packets = errors[0] + errors[1], received + sent
    observed = []
    if wrong > packets * limits["errors_ppm"] / 1e6:
        observed.append(f"{wrong} errors in {packets} packets" + (f" ({errors[2]} CRC)" if errors[2] else ""))
    if down >= limits["carrier_losses"]:
        observed.append(f"lost its carrier {down} times since start")
    return f"{name}: {' and '.join(observed)}" if observed else ""
