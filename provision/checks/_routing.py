"""Addresses and routes of a node, as ``ip -o``, ``fib_trie``, ``if_inet6`` and ``route`` list them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, ip_address, ip_interface

Address = IPv4Address | IPv6Address
Interface = IPv4Interface | IPv6Interface
Routes = list[tuple[int, int, str, IPv4Network]]  # less the prefix length, metric, interface, network


def as_address(text: str) -> Address | None:
    """An IP address, None for what is none."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def addresses(lines: Sequence[str]) -> list[tuple[str, Interface]]:
    """Each with its interface, "" where only the address is known."""
    found: list[tuple[str, str]] = []
    leaf = ""
    for line in lines:
        words = line.split()
        if match := re.match(r"\d+: (\S+)\s+inet6? (\S+)", line):  # ip -o addr
            found.append((match[1].partition("@")[0], match[2]))
        elif match := re.fullmatch(r"\|-- ([0-9.]+)", line):  # fib_trie: an address, then what it is
            leaf = match[1]
        elif line == "/32 host LOCAL" and leaf:
            found.append(("", leaf))
        elif words[0] == "inet6" and len(words) == 7:  # if_inet6: 32 digits, index, prefix length, scope, flags, name
            digits = ":".join(re.findall("....", words[1]))
            found.append((words[6], f"{digits}/{int(words[3], 16)}" if re.fullmatch("[0-9a-f]+", words[3]) else ""))
    return [(name, interface) for name, text in found if (interface := _interface(text))]


def _interface(text: str) -> Interface | None:
    try:
        return ip_interface(text)
    except ValueError:
        return None


def routes_of(lines: Sequence[str]) -> Routes:
    """/proc/net/route, the most specific first, and of equal ones that with the lowest metric."""
    found = []
    for line in lines:
        words = line.split()
        if (
            len(words) != 11
            or not words[6].isdecimal()
            or not re.fullmatch("[0-9A-F]{8} [0-9A-F]{8}", f"{words[1]} {words[7]}")
        ):
            continue
        mask = _kernels(words[7]).bit_count()
        network = IPv4Network((_kernels(words[1]) & _kernels(words[7]), mask), strict=False)
        found.append((-network.prefixlen, int(words[6]), words[0], network))
    return sorted(found)


def _kernels(digits: str) -> int:
    """A word of /proc/net/route: an address in the machine's byte order, little-endian wherever there are GPUs."""
    return int.from_bytes(bytes.fromhex(digits), "little")


def _on(address: Address, routes: Routes) -> str:
    """The interface of the most specific route, "" without one."""
    loop = "lo" if address.is_loopback else ""
    return loop or next((name for _, _, name, network in routes if address in network), "")


def placed(name: str, interface: Interface, routes: Routes) -> tuple[str, Interface]:
    """An address of which only itself is known, with the interface and the network of the route that holds it."""
    if name or not isinstance(interface, IPv4Interface):
        return name, interface
    for _, _, device, net in routes:
        if interface.ip in net and net.prefixlen:
            return device, IPv4Interface(f"{interface.ip}/{net.prefixlen}")
    return ("lo" if interface.ip.is_loopback else ""), interface


def way_to(
    lines: Sequence[str], peer: Address | None, known: Sequence[tuple[str, Interface]], routes: Routes
) -> tuple[str, Address | None] | None:
    for line in lines:
        if match := re.search(r"(?:^| )dev (\S+)", line):  # ip -o route get
            source = re.search(r" src (\S+)", line)
            return match[1], as_address(source[1]) if source else None
    name = _on(peer, routes) if peer else ""
    if not name:
        return None
    return name, next((each.ip for on, each in known if on == name and each.version == 4), None)
