"""Network: the simple checks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from provision.checks.kit import (
    Answer,
    Answers,
    Judgement,
    Judgements,
    Plan,
    each_node,
    fail,
    majority,
    number,
    odd,
    ok,
    unknown,
    warn,
)
from provision.checks.kit.network import Address, Link, Network, as_address, carrier_nodes, each, facts, read, table

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


@each_node(
    "net.backlog",
    "enough room for connections that come at the same moment",
    probe="cat /proc/sys/net/core/somaxconn /proc/sys/net/ipv4/tcp_max_syn_backlog",
    # somaxconn was 128 and tcp_max_syn_backlog is at least 128 by default: more than the ranks of 16 nodes are more.
    limits={"waiting": 128, "waiting_per_node": 16},
    why="All ranks connect to rank 0 at once; what finds no room is tried again after seconds, or refused.",
)
def backlog(plan: Plan, answer: Answer) -> Judgement:
    """WARN where less than 16 connections a node, and at least ``waiting``, can wait.

    net.core.somaxconn bounds how many connections wait to be accepted: 4096 since Linux 5.4, 128 before (listen(2)).
    """
    need = max(plan.limits["waiting"], plan.limits["waiting_per_node"] * len(plan.nodes))
    if len(answer.lines) != 2 or not all(line.isdecimal() for line in answer.lines):
        return unknown("net.core.somaxconn cannot be read")
    waiting, half = (int(line) for line in answer.lines)
    if min(waiting, half) < need:
        low = "net.core.somaxconn" if waiting <= half else "net.ipv4.tcp_max_syn_backlog"
        fix = f"sysctl -w {low}=4096, and in /etc/sysctl.d"
        return warn(f"{low} is {min(waiting, half)}", expected=f"at least {need:g}", fix=fix)
    return ok(f"somaxconn {waiting}, tcp_max_syn_backlog {half}")


@each_node(
    "net.docker0",
    "no bridge inside the node covers another node's address",
    probe=facts,
    why="What the node sends to those nodes goes to its own containers: they cannot be reached from it.",
)
def docker0(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where a subnet of a bridge without devices overlaps.

    Docker gives docker0 172.17.0.0/16 by default, and further networks the next ones (Docker's documentation,
    "default-address-pools"); libvirt takes 192.168.122.0/24.
    """
    members: dict[Address, str] = {}
    for node in plan.nodes:
        answer = answers.get(node.name)
        own = read(answer) if answer else None
        for address in (as_address(node.address), as_address(node.data_address or ""), own.own if own else None):
            if address:
                members.setdefault(address, node.name)

    def one(name: str, net: Network) -> Judgement:
        inner = [
            (link, interface)
            for on, interface in net.addresses
            if (link := net.links.get(on)) and link.kind == "bridge" and not net.devices(link)
        ]
        for link, interface in inner:
            hit = sorted({other for address, other in members.items() if address in interface.network} - {name})
            if hit:
                observed = f"{link.name} has {interface.network}, which holds the address of {', '.join(hit)}"
                fix = '"bip" or "default-address-pools" in /etc/docker/daemon.json (libvirt: virsh net-edit default)'
                return fail(observed, fix=fix)
        return ok(f"{len(inner)} inner bridges, none overlaps" if inner else "no inner bridge with an address")

    yield from each(answers, one)


@each_node(
    "net.route",
    "the data address is on an interface of the node, and is what others see",
    probe=facts,
    why=(
        "Rank 0 cannot listen at an address that it does not have, and nodes that answer from another network use the "
        "slow one or are not let through."
    ),
)
def route(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where no interface has the address; WARN where packets to rank 0 carry another one.

    PyTorch's rendezvous compares MASTER_ADDR with the machine's own addresses and waits 60 to 900 s when none matches
    (pytorch#79388).
    """
    addresses = {node.name: node.train_address for node in plan.nodes}

    def one(name: str, net: Network) -> Judgement:
        address = addresses[name]
        if net.own is None:
            fix = f"getent hosts {address}; write an IP address into the inventory"
            return fail(f"{address} has no address there", fix=fix)
        if net.owner is None:
            has = sorted({str(each.ip) for _, each in net.addresses if not (each.is_loopback or each.is_link_local)})
            observed = f"no interface has {net.own}; it has {', '.join(has) or 'no address'}"
            return fail(observed, fix=f"correct data_address of {name} in the inventory")
        source = net.way[1] if net.way else None
        if source and source != net.own and net.way and net.way[0] != "lo":
            observed = (
                f"packets to {net.peer} leave over {net.way[0]} with {source}, not with {net.own} of {net.owner.name}"
            )
            return warn(observed, fix=f"ip route get {net.peer}; give it a route over the fast net")
        return ok(f"{net.own} on {net.owner.name}")

    yield from each(answers, one)


def _twins(net: Network) -> tuple[str, ...]:
    """Interfaces with an IPv4 address in the same network, the first such group."""
    shared: dict[object, set[str]] = {}
    for name, network in net.connected:
        if name and not network.is_loopback and network.prefixlen < 32:
            shared.setdefault(network, set()).add(name)
    return next((tuple(sorted(names)) for names in shared.values() if len(names) > 1), ())


@each_node(
    "net.rpf",
    "reverse path filtering drops nothing between interfaces of one network",
    probe=facts,
    why="NCCL uses every network card; packets that arrive on the second one are dropped, and connections hang.",
)
def rpf(answers: Answers) -> Judgements:
    """WARN where two interfaces share a network and one of them filters strictly.

    With rp_filter 1 the kernel drops packets whose answer would leave over another interface (kernel, ip-sysctl; RFC
    3704). The value in force is the larger of ``all`` and the interface's own.
    """

    def one(name: str, net: Network) -> Judgement:
        filters = {each: row[0] for each, row in table(answers[name], "rpf").items() if row}
        twins = _twins(net)
        if not twins:
            return ok("every interface has its own network")
        if not filters.get("all", "").isdecimal():
            return unknown("net.ipv4.conf.all.rp_filter cannot be read")
        values = {each: max(int(filters["all"]), number(filters.get(each)) or 0) for each in twins}
        strict = [each for each, value in values.items() if value == 1]
        if strict:
            observed = f"{' and '.join(twins)} are in one network, and rp_filter of {strict[0]} is 1"
            fix = f"sysctl -w net.ipv4.conf.all.rp_filter=2 net.ipv4.conf.{strict[0]}.rp_filter=2, and in /etc/sysctl.d"
            return warn(observed, expected="0 or 2", fix=fix)
        return ok(f"{' and '.join(twins)} are in one network, rp_filter is {max(values.values())}")

    yield from each(answers, one)
