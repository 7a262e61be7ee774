"""The nodes of a new inventory: their names, data addresses and GPU counts, from the command line and nodes' facts.

A node's facts are the output of ``templates/enrol/ask.sh.j2``. Pure.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Interface
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.inventory.names import check_name, expand
from provision.inventory.schema import target
from provision.inventory.selection import fold
from provision.model import Node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from ipaddress import IPv4Network

_INFINIBAND = "32"  # ARPHRD_INFINIBAND of linux/if_arp.h
_GPU = re.compile(r"GPU \d+: (?P<name>.*?)(?: \(UUID: .*)?")
_IP = re.compile(r"\d+: (?P<name>[^\s@]+)\S*\s+inet (?P<address>[0-9.]+/\d+) ")


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: the kernel's name for it.
        addresses: its IPv4 addresses, each with its network.
        infiniband: whether it is IP over InfiniBand.
        up: False if the kernel reports it as down.
        speed: Mbit/s; None: unknown.
    """

    name: str
    addresses: tuple[IPv4Interface, ...]
    infiniband: bool = False
    up: bool = True
    speed: int | None = None


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter, as in sysfs: ``4: ACTIVE``, ``400 Gb/sec (4X NDR)``."""

    device: str
    number: str
    layer: str
    state: str
    rate: str


@dataclass(frozen=True)
class Facts:
    """A node's facts. ``reached`` is the node's address in the ssh connection, empty if unknown."""

    host: str
    reached: str = ""
    gpus: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()


def read_facts(out: str) -> Facts:
    """The facts in the script's output. Unknown and malformed lines are skipped."""
    values: dict[str, list[str]] = {}
    for line in out.splitlines():
        kind, tab, rest = line.partition("\t")
        if tab:
            values.setdefault(kind, []).append(rest)
    if "ip" in values:
        addresses = list(_from_ip(values["ip"]))
    else:
        addresses = list(_from_proc(values.get("trie", []), values.get("route", [])))
    return Facts(
        host="".join(values.get("host", [""])[:1]).strip(),
        reached="".join(values.get("reached", [""])[:1]).strip(),
        gpus=tuple(_gpu(text) for text in values.get("gpu", ())),
        interfaces=tuple(
            _interface(line.split("\t"), addresses) for line in values.get("net", ()) if line.count("\t") == 3
        ),
        ports=tuple(Port(*line.split("\t")) for line in values.get("port", ()) if line.count("\t") == 4),
    )


def _gpu(text: str) -> str:
    found = _GPU.fullmatch(text.strip())
    return found["name"] if found else text.strip()


def _interface(words: Sequence[str], addresses: Sequence[tuple[str, IPv4Interface]]) -> Interface:
    name, kind, state, speed = words
    return Interface(
        name,
        tuple(address for owner, address in addresses if owner == name),
        infiniband=kind == _INFINIBAND,
        up=state not in {"down", "lowerlayerdown", "dormant", "notpresent"},  # "unknown" is usual for a tunnel or veth
        speed=int(speed) if re.fullmatch("[0-9]{1,10}", speed) and 0 < int(speed) < 2**31 else None,  # -1: not known
    )


def _from_ip(lines: Sequence[str]) -> Iterator[tuple[str, IPv4Interface]]:
    """``ip -o -4 address show``: ``2: eth0    inet 10.0.0.2/24 brd 10.0.0.255 scope global eth0 …``."""
    for line in lines:
        if found := _IP.match(line):
            with suppress(ValueError):
                yield found["name"], IPv4Interface(found["address"])


def _from_proc(trie: Sequence[str], routes: Sequence[str]) -> Iterator[tuple[str, IPv4Interface]]:
    """The local addresses of ``/proc/net/fib_trie``, each with the interface whose network in ``/proc/net/route`` fits.

    The kernel's fs/proc and net/ipv4/fib_trie.c define both formats. Numbers in ``route`` are in the machine's byte
    order, which is little-endian on every machine with GPUs.
    """
    networks = []
    for line in routes:
        words = line.split()
        with suppress(ValueError, IndexError):
            target, gateway, mask = (int(words[index], 16).to_bytes(4, "little") for index in (1, 2, 7))
            if not any(gateway) and any(mask):
                network = ipaddress.IPv4Network((target, str(IPv4Address(mask))))
                networks.append((words[0], network))
    local = dict.fromkeys(
        below.split()[1]
        for below, above in itertools.pairwise(trie)
        if below.split()[:1] == ["|--"] and above.split() == ["/32", "host", "LOCAL"]
    )
    for text in local:
        address = IPv4Address(text)
        fitting = [(name, network) for name, network in networks if address in network]
        if fitting:
            name, network = max(fitting, key=lambda pair: pair[1].prefixlen)
            yield name, IPv4Interface((address, network.prefixlen))


# --- the choice -----------------------------------------------------------------------------------

# Interfaces that reach no other node: containers, virtual machines, tunnels and service processors.
_INWARD = re.compile(
    r"lo\d*|(docker|br-|virbr|veth|vnet|vmnet|vboxnet|cni|flannel|cali|kube|weave|cilium|lxc|lxd|podman|tun|tap"
    r"|tailscale|zt|wg|dummy|sit|gre|ip6tnl|idrac|usb).*"
)


@dataclass(frozen=True)
class Wanted:
    """A node as the command line or another tool's file names it. None: not known yet.

    ``name`` is None if only an address was given; ``origin`` is the source, such as ``hosts.ini line 3``.
    """

    address: str
    name: str | None = None
    user: str | None = None
    port: int | None = None
    gpus: int | None = None
    data_address: str | None = None
    origin: str = field(default="", compare=False)


def parse_hosts(hosts: Sequence[str]) -> tuple[Wanted, ...]:
    """The nodes of the command line: each ``[NAME=]ADDRESS`` or ranges of both, such as ``gpu[1-4]=10.0.0.[1-4]``.

    Raises:
        UsageError: a host cannot be parsed, or a name or an address is listed twice.
    """
    found: list[Wanted] = []
    for host in hosts:
        name, equals, address = host.rpartition("=")
        if (equals and not name) or not address:
            raise UsageError(f"{host!r} is not [NAME=]ADDRESS")
        try:
            user, address, port = target(address)
            addresses = expand(address)
            names: Sequence[str | None] = expand(name) if equals else [None] * len(addresses)
        except ValueError as error:
            raise UsageError(
                f"{host!r:.200} is neither a host nor a range of hosts: {error}",
                hint="write [NAME=][USER@]ADDRESS[:PORT], such as gpu[01-04]=root@10.0.0.[1-4]",
            ) from error
        if len(names) != len(addresses):
            raise UsageError(
                f"{host!r}: {len(names)} names, {len(addresses)} addresses", hint="gpu[01-04]=10.0.0.[1-4]"
            )
        found += [Wanted(at, known, user, port, origin=shown(host)) for known, at in zip(names, addresses, strict=True)]
    for what, values in (
        ("name", [(each.name, None) for each in found]),
        ("address", [(each.address, each.port) for each in found]),
    ):
        twice = [value for (value, _), count in Counter(values).items() if value is not None and count > 1]
        if twice:
            raise UsageError(f"the {what} {twice[0]} is listed twice", hint="name every node once")
    return tuple(found)


def draft_nodes(hosts: Sequence[Wanted]) -> tuple[Node, ...]:
    """The nodes before any of them reported facts. The default name is the address's host name, or ``nodeN``."""
    names = _names(hosts, {})
    return tuple(_node(each, name) for each, name in zip(hosts, names, strict=True))


def describe_nodes(hosts: Sequence[Wanted], facts: Mapping[int, Facts]) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes of an inventory, and sentences that explain the choice.

    Args:
        hosts: the nodes that were named.
        facts: the facts of the nodes that answered, by index in ``hosts``.
    """
    names = _names(hosts, facts)
    nodes = [
        replace(_node(each, name), gpus=each.gpus or (len(facts[index].gpus) if index in facts else 0) or None)
        for index, (each, name) in enumerate(zip(hosts, names, strict=True))
    ]
    notes = _hardware(names, facts)
    if not any(each.data_address for each in hosts):
        chosen, why = data_addresses(facts)
        nodes = [replace(node, data_address=chosen.get(index)) for index, node in enumerate(nodes)]
        notes += [why] if why else []
        silent = [node.name for index, node in enumerate(nodes) if chosen and index not in chosen]
        if silent:
            notes.append(f"{fold(silent)}: no data_address, because it did not answer; the others have one")
    return tuple(nodes), tuple(notes)


def data_addresses(facts: Mapping[int, Facts]) -> tuple[dict[int, str], str]:
    """Each node's address on the best network for training, and why it was chosen; empty if there is no such network.

    Every node must have a separate address in the network, and ssh must not use it. IP over InfiniBand comes first,
    then the fastest network. A network that is known to be slower than ssh's is not used.
    """
    if len(facts) < 2:
        return {}, ""
    mine = {index: known for index, node in facts.items() if (known := _ssh_interface(node))}
    if len(mine) < len(facts):  # ssh's network is unknown
        return {}, ""
    reached = [address.network for known in mine.values() for address in known.addresses]
    places: dict[IPv4Network, dict[int, tuple[Interface, str]]] = {}
    for index, node in facts.items():
        for interface in node.interfaces:
            if not interface.up or interface == mine[index] or _INWARD.fullmatch(interface.name):
                continue
            for address in interface.addresses:
                network = address.network
                if not (
                    address.is_loopback or address.is_link_local or any(network.overlaps(each) for each in reached)
                ):
                    places.setdefault(network, {}).setdefault(index, (interface, str(address.ip)))
    common = {
        network: there
        for network, there in places.items()
        if len(there) == len(facts) and len({address for _, address in there.values()}) == len(there)
    }
    pace = _pace(list(mine.values()))
    fit = {
        network: there
        for network, there in common.items()
        if _infiniband(there) or not (pace and (speed := _pace([each for each, _ in there.values()])) and speed < pace)
    }
    if not fit:
        return {}, ""
    best = max(
        sorted(fit), key=lambda net: (_infiniband(fit[net]), _pace([each for each, _ in fit[net].values()]) or 0)
    )
    there = fit[best]
    kind = "InfiniBand" if _infiniband(there) else _speed(_pace([each for each, _ in there.values()]))
    names = "/".join(dict.fromkeys(interface.name for interface, _ in there.values()))
    why = f"data_address: {best} on {names}" + (f", {kind}" if kind else "")
    return {index: address for index, (_, address) in there.items()}, why


def _node(host: Wanted, name: str) -> Node:
    return Node(name, host.address, host.data_address, host.user, host.port, host.gpus)


def _names(hosts: Sequence[Wanted], facts: Mapping[int, Facts]) -> list[str]:
    """The given name, or the host name; for a bare address the node's own host name; else ``nodeN``."""
    shared = {address for address, count in Counter(each.address for each in hosts).items() if count > 1}
    names = {
        index: each.name or each.address
        for index, each in enumerate(hosts)
        if each.name or not (_is_address(each.address) or each.address in shared)
    }
    own = {index: facts[index].host for index in facts if index not in names}
    short = {index: name.partition(".")[0] for index, name in own.items()}
    for candidates in (short, own):
        counts = Counter(candidates.values())
        for index, name in candidates.items():
            if index not in names and _sane(name) and counts[name] == 1 and name not in names.values():
                names[index] = name
    for index in range(len(hosts)):
        if index not in names:
            numbers = itertools.chain([index + 1], itertools.count(1))
            names[index] = next(name for number in numbers if (name := f"node{number}") not in names.values())
    return [names[index] for index in range(len(hosts))]


def _sane(name: str) -> bool:
    """Whether a machine's host name can identify it."""
    try:
        check_name(name)
    except ValueError:
        return False
    return not _is_address(name) and not name.startswith("localhost")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _ssh_interface(node: Facts) -> Interface | None:
    """The interface that ssh reached."""
    for interface in node.interfaces:
        if any(str(address.ip) == node.reached for address in interface.addresses):
            return interface
    return None


def _infiniband(there: Mapping[int, tuple[Interface, str]]) -> bool:
    return all(interface.infiniband for interface, _ in there.values())


def _pace(interfaces: Sequence[Interface]) -> int | None:
    """The lowest speed; None if one is unknown."""
    speeds = [interface.speed for interface in interfaces]
    known = [speed for speed in speeds if speed is not None]
    return min(known) if known and len(known) == len(speeds) else None


def _speed(pace: int | None) -> str:
    return "" if pace is None else f"{pace / 1000:g} Gbit/s" if pace >= 1000 else f"{pace} Mbit/s"


def _hardware(names: Sequence[str], facts: Mapping[int, Facts]) -> list[str]:
    """The nodes' GPUs and adapters, one sentence for equal nodes."""
    groups: dict[str, list[str]] = {}
    for index, node in facts.items():
        gpus = [f"{count} x {name}" for name, count in Counter(node.gpus).items()] or ["no GPU"]
        ports = Counter(f"{port.layer} {port.rate}, {port.state.rpartition(' ')[2]}" for port in node.ports)
        adapters = [f"{count} x {port}" for port, count in ports.items()]
        groups.setdefault("; ".join([*gpus, *adapters]), []).append(names[index])
    return [f"{fold(members)}: {text}" for text, members in groups.items()]
