"""Parses the output of ``templates/enrol/ask.sh.j2`` into a node's facts."""

from __future__ import annotations

import ipaddress
import itertools
import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
