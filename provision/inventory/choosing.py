"""From what was given and what nodes say to the nodes of an inventory: names, data addresses, GPUs. Pure."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.inventory.names import check_name, expand
from provision.inventory.schema import target
from provision.inventory.selection import fold
from provision.model import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from ipaddress import IPv4Network

    from provision.inventory.asking import Facts, Interface

# Interfaces that lead to no other node: of containers, virtual machines, tunnels and service processors.
_INWARD = re.compile(
    r"lo\d*|(docker|br-|virbr|veth|vnet|vmnet|vboxnet|cni|flannel|cali|kube|weave|cilium|lxc|lxd|podman|tun|tap"
    r"|tailscale|zt|wg|dummy|sit|gre|ip6tnl|idrac|usb).*"
)


@dataclass(frozen=True)
class Wanted:
    """A node as somebody has named it; what is None is not known yet.

    ``name`` is None where only an address was given; ``origin`` says who wrote it, such as ``hosts.ini line 3``.
    """

    address: str
    name: str | None = None
    user: str | None = None
    port: int | None = None
    gpus: int | None = None
    data_address: str | None = None
    origin: str = field(default="", compare=False)


def wanted(hosts: Sequence[str]) -> tuple[Wanted, ...]:
    """What the command line names: each ``[NAME=]ADDRESS`` or ranges of both, such as ``gpu[1-4]=10.0.0.[1-4]``.

    Raises:
        UsageError: one cannot be understood, or a name or an address is there twice.
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
            raise UsageError(f"the {what} {twice[0]} is there twice", hint="name every node once")
    return tuple(found)


def draft(hosts: Sequence[Wanted]) -> tuple[Node, ...]:
    """The nodes before anybody was asked: one without a name is called as it is reached, or ``nodeN``."""
    names = _names(hosts, {})
    return tuple(_node(each, name) for each, name in zip(hosts, names, strict=True))


def described(hosts: Sequence[Wanted], facts: Mapping[int, Facts]) -> tuple[tuple[Node, ...], tuple[str, ...]]:
    """The nodes of an inventory, and what there is to say about the choice, one sentence each.

    Args:
        hosts: who was named.
        facts: what those that could be asked have said, by their place in ``hosts``.
    """
    names = _names(hosts, facts)
    nodes = [
        replace(_node(each, name), gpus=each.gpus or (len(facts[index].gpus) if index in facts else 0) or None)
        for index, (each, name) in enumerate(zip(hosts, names, strict=True))
    ]
    notes = _told(names, facts)
    if not any(each.data_address for each in hosts):
        chosen, why = data_addresses(facts)
        nodes = [replace(node, data_address=chosen.get(index)) for index, node in enumerate(nodes)]
        notes += [why] if why else []
        silent = [node.name for index, node in enumerate(nodes) if chosen and index not in chosen]
        if silent:
            notes.append(f"{fold(silent)}: no data_address, it gave no answer; the others have one")
    return tuple(nodes), tuple(notes)


def data_addresses(facts: Mapping[int, Facts]) -> tuple[dict[int, str], str]:
    """An address of each node on the network that is best for training, and why it was chosen; none when there is none.

    It is a network that every node has an address of its own in, and not the one over which they were reached: IP over
    InfiniBand first, else the fastest. One that is known to be slower than the network of ssh is left alone.
    """
    if len(facts) < 2:
        return {}, ""
    mine = {index: known for index, node in facts.items() if (known := _reached(node))}
    if len(mine) < len(facts):  # nobody knows which network is not that of ssh
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
    """The name that was given, or is reached; of a bare address what the node calls itself; else ``nodeN``."""
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
    """Whether a machine's own name says which one it is."""
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


def _reached(node: Facts) -> Interface | None:
    """The interface over which the node was asked."""
    for interface in node.interfaces:
        if any(str(address.ip) == node.reached for address in interface.addresses):
            return interface
    return None


def _infiniband(there: Mapping[int, tuple[Interface, str]]) -> bool:
    return all(interface.infiniband for interface, _ in there.values())


def _pace(interfaces: Sequence[Interface]) -> int | None:
    """The slowest speed among them; None when one is not known."""
    speeds = [interface.speed for interface in interfaces]
    known = [speed for speed in speeds if speed is not None]
    return min(known) if known and len(known) == len(speeds) else None


def _speed(pace: int | None) -> str:
    return "" if pace is None else f"{pace / 1000:g} Gbit/s" if pace >= 1000 else f"{pace} Mbit/s"


def _told(names: Sequence[str], facts: Mapping[int, Facts]) -> list[str]:
    """What nodes have, equal ones together."""
    groups: dict[str, list[str]] = {}
    for index, node in facts.items():
        gpus = [f"{count} x {name}" for name, count in Counter(node.gpus).items()] or ["no GPU"]
        ports = Counter(f"{port.layer} {port.rate}, {port.state.rpartition(' ')[2]}" for port in node.ports)
        adapters = [f"{count} x {port}" for port, count in ports.items()]
        groups.setdefault("; ".join([*gpus, *adapters]), []).append(names[index])
    return [f"{fold(members)}: {text}" for text, members in groups.items()]
