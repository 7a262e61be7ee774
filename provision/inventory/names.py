"""Names and addresses of nodes: ranges, valid forms, and likely typing errors."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.inventory.document import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from provision.model import Inventory, Node

MAX_NODES = 4096  # of one entry, and of an inventory; a range beyond this is a typing error
MAX_TEXT = 1000  # characters of an entry without its ranges; a name has 253 at most

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_BRACKETED = re.compile(r"\[(?P<host>(?:[^\[\]]|\[[^\[\]]*\])*)\](?::(?P<port>.*))?")  # a range in it has its own
_SCOPE = re.compile(r"[A-Za-z0-9_.-]{1,15}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def expand(pattern: str) -> list[str]:
    """``gpu[01-03,07]`` -> its names, in the written order: ``gpu[02,01]`` stays so.

    A NodeSet would sort them, but names are paired with addresses by position.

    Raises:
        ValueError: an unmatched bracket, a range that runs backwards, or more than ``MAX_NODES`` names.
    """
    parts = re.split(r"(\[[^\[\]]*\])", pattern)
    if any(re.search(r"[\[\]]", part) for part in parts[::2]):
        raise ValueError(f"{shown(pattern)} has an unmatched bracket: write a range as gpu[01-04,07]")
    if sum(map(len, parts[::2])) > MAX_TEXT:
        raise ValueError(f"{shown(pattern)} is too long: more than {MAX_TEXT} characters")
    choices = [[part] if index % 2 == 0 else _numbers(part) for index, part in enumerate(parts)]
    if math.prod(len(choice) for choice in choices) > MAX_NODES:
        raise ValueError(f"{shown(pattern)} has more than {MAX_NODES} names")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(brackets: str) -> list[str]:
    numbers: list[str] = []
    for item in brackets[1:-1].split(","):
        numbers += _span(item.strip(), brackets)
        if len(numbers) > MAX_NODES:
            raise ValueError(f"{shown(brackets)} has more than {MAX_NODES} numbers")
    return numbers


def _span(item: str, brackets: str) -> Iterator[str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise ValueError(f"{shown(brackets)} is not a range such as [01-04,07]")
    first, last, step = match[1], match[2] or match[1], int(match[3] or 1)
    if int(last) < int(first):
        raise ValueError(f"{shown(brackets)} runs backwards: {first} to {last}")
    if first.startswith("0") and len(first) != len(last) and first != "0":
        raise ValueError(f"{shown(brackets)} mixes widths: write {first} to {last.zfill(len(first))}")
    if step == 0 or (int(last) - int(first)) // step >= MAX_NODES:
        raise ValueError(f"{shown(brackets)} has more than {MAX_NODES} numbers")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1, step))


def check_name(name: str) -> None:
    """Raise ``ValueError`` if a node cannot have this name."""
    if not _NAME.fullmatch(name):
        advice = "; several nodes are written gpu[01,03]" if re.search(r"[,\s]", name) else ""
        raise ValueError(f"{shown(name) or 'nothing'} is not a node name (letters, digits, . _ - only){advice}")


def split_target(text: str) -> tuple[str | None, str, str | None]:
    """The login name, the address and the port of ``[USER@]ADDRESS[:PORT]``, the syntax of ``ssh -J``.

    An IPv6 address with a port needs brackets: ``[fd00::1]:22``. The parts are not validated.
    """
    user, at, rest = text.rpartition("@")
    bracketed = _BRACKETED.fullmatch(rest)
    if bracketed and bracketed["host"].count(":") >= 2:
        host, port = bracketed["host"], bracketed["port"]
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    else:
        host, port = rest, None
    return user if at else None, host, port


def check_address(address: str) -> None:
    """Raise ``ValueError`` unless ``address`` is an IPv4 or IPv6 address or a host name."""
    text = shown(address)
    if address.count(":") >= 2:
        number, percent, scope = address.partition("%")
        try:
            ipaddress.IPv6Address(number)
        except ValueError:
            raise ValueError(f"{text} is not an IPv6 address") from None
        if percent and not _SCOPE.fullmatch(scope):  # ssh_config's commands get it as %h
            raise ValueError(f"{text} is not an IPv6 address: after % comes the name of an interface")
        return
    labels = address.split(".")
    digits = sum(bool(re.fullmatch("[0-9]+", label)) for label in labels)
    if digits == len(labels) or (digits >= 3 and len(labels) == 4):  # not a host name: an address with a mistake
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            raise ValueError(f"{text} is not an IPv4 address (four numbers from 0 to 255{_zeros(labels)})") from None
        return
    if "@" in address:
        raise ValueError(f"{text} is not an address: the login name goes into `user`")
    if re.search(r":[0-9]+$", address):
        raise ValueError(f"{text} is not an address: the port goes into `port`")
    if len(address) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text or 'nothing'} is neither a host name nor an IP address")


def _zeros(labels: list[str]) -> str:
    return ", without leading zeros" if any(re.fullmatch("0[0-9]+", label) for label in labels) else ""


def likely_typo(inventory: Inventory, node: Node) -> str | None:
    """A sentence if ``node``'s address differs from all others as a typing error would make it; else None.

    ``192.169.20.16`` among ``192.168.20.x`` is such an address; two racks with a network each are not.
    """
    return next(likely_typos(inventory, [node]), None)


def likely_typos(inventory: Inventory, nodes: Iterable[Node]) -> Iterator[str]:
    """The sentence of ``likely_typo`` for each of ``nodes`` that has one."""
    everyone = [_Networks.of((node.name, node.address) for node in inventory.nodes)]
    everyone.append(_Networks.of((node.name, node.data_address) for node in inventory.nodes))
    for node in nodes:
        texts = (("address", node.address), ("data_address", node.data_address))
        found = (_network_typo(node.name, *text, known) for text, known in zip(texts, everyone, strict=True))
        yield from itertools.islice(filter(None, found), 1)


@dataclass(frozen=True)
class _Networks:
    """The networks of all nodes with an IPv4 address, counted once: an inventory may have thousands of nodes."""

    known: Sequence[tuple[str, tuple[int, int]]]
    counts: Mapping[tuple[int, int], int]
    most: tuple[tuple[int, int], int] | None

    @staticmethod
    def of(addresses: Iterable[tuple[str, str | None]]) -> _Networks:
        known = [(name, network) for name, text in addresses if (network := _network(text))]
        counts = Counter(network for _, network in known)
        return _Networks(known, counts, next(iter(counts.most_common(1)), None))


def _network_typo(name: str, what: str, address: str | None, networks: _Networks) -> str | None:
    own, known = _network(address), networks.known
    if own is None or networks.most is None or len(known) < 2:
        return None
    if len(known) == 2:
        other, network = next(pair for pair in known if pair[0] != name)
        distance = sorted(abs(a - b) for a, b in zip(own, network, strict=True))
        blamed = _is_private(network) if _is_private(network) != _is_private(own) else known[1][0] == name
        if distance != [0, 1] or not blamed:
            return None
        whose, usual = f"that of {other}", network
    else:
        usual, count = networks.most
        same = networks.counts[own]
        odd = same == 1 or _is_private(usual) != _is_private(own)
        if own == usual or not odd or count <= len(known) / 2 or count < 2 * same:
            return None
        whose = f"those of {count} other nodes"
    begins = f"{name}: {what} {address} begins with {own[0]}.{own[1]}"
    return f"{begins}, {whose} with {usual[0]}.{usual[1]}; is it a typing error?"


def _network(address: str | None) -> tuple[int, int] | None:
    try:
        packed = ipaddress.IPv4Address(address or "").packed
    except ValueError:
        return None
    return packed[0], packed[1]


def _is_private(network: tuple[int, int]) -> bool:
    return ipaddress.IPv4Address(f"{network[0]}.{network[1]}.0.1").is_private
