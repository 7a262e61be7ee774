"""Names and addresses of nodes: their ranges, what they must look like, and the typing errors they tend to have."""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from provision.inventory.document import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from provision.model import Inventory, Node

MAX_NODES = 4096  # a range beyond this is a slip of the finger

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_INTERFACE = re.compile(r"[A-Za-z0-9_.-]{1,15}")  # Linux's longest name has 15 characters
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


def expand(pattern: str) -> list[str]:
    """``gpu[01-03,07]`` -> its names in the order written, which ``gpu[02,01]`` keeps.

    The written order is why this is no NodeSet: names and addresses are paired in step.

    Raises:
        ValueError: a bracket without its partner, a range that runs backwards, or more than ``MAX_NODES`` names.
    """
    parts = re.split(r"(\[[^\[\]]*\])", pattern)
    if any(re.search(r"[\[\]]", part) for part in parts[::2]):
        raise ValueError(f"{shown(pattern)} has a bracket without its partner: a range is written gpu[01-04,07]")
    choices = [[part] if index % 2 == 0 else _numbers(part) for index, part in enumerate(parts)]
    if math.prod(len(choice) for choice in choices) > MAX_NODES:
        raise ValueError(f"{shown(pattern)} stands for more than {MAX_NODES} names")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(brackets: str) -> list[str]:
    return [number for item in brackets[1:-1].split(",") for number in _span(item.strip(), brackets)]


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
        raise ValueError(f"{shown(brackets)} stands for more than {MAX_NODES} numbers")
    return (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1, step))


def check_name(name: str) -> None:
    """Raise ``ValueError`` for what cannot be a node's name."""
    if not _NAME.fullmatch(name):
        advice = "; several nodes are written gpu[01,03]" if re.search(r"[,\s]", name) else ""
        raise ValueError(f"{shown(name) or 'nothing'} is not a node name (letters, digits, . _ - only){advice}")


def check_address(address: str) -> None:
    """Raise ``ValueError`` for what is neither an IPv4 or IPv6 address nor a host name."""
    text = shown(address)
    if address.count(":") >= 2:
        number, has, interface = address.partition("%")
        try:
            ipaddress.IPv6Address(number)
        except ValueError:
            raise ValueError(f"{text} is not an IPv6 address") from None
        if has and not _INTERFACE.fullmatch(interface):  # ipaddress takes any text there, blanks and brackets too
            raise ValueError(
                f"{text} is not an IPv6 address: the name of an interface follows the %, as in fe80::1%ib0"
            )
        return
    labels = address.split(".")
    digits = sum(bool(re.fullmatch("[0-9]+", label)) for label in labels)
    if digits == len(labels) or (digits >= 3 and len(labels) == 4):  # no host name: somebody meant an address
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
        raise ValueError(f"{text} is neither a host name nor an IP address")


def _zeros(labels: list[str]) -> str:
    return ", without leading zeros" if any(re.fullmatch("0[0-9]+", label) for label in labels) else ""


def likely_typo(inventory: Inventory, node: Node) -> str | None:
    """One sentence when ``node``'s address stands apart from all others as a typing error would make it.

    ``192.169.20.16`` among ``192.168.20.x`` is such an address; two racks with a network each are not.
    """
    nodes = inventory.nodes
    return _stands_apart(node.name, "address", node.address, [(n.name, n.address) for n in nodes]) or _stands_apart(
        node.name, "data_address", node.data_address, [(n.name, n.data_address) for n in nodes]
    )


def _stands_apart(name: str, what: str, address: str | None, everyone: Sequence[tuple[str, str | None]]) -> str | None:
    own = _network(address)
    known = [(other, network) for other, text in everyone if (network := _network(text))]
    if own is None or len(known) < 2:
        return None
    if len(known) == 2:
        other, network = next(pair for pair in known if pair[0] != name)
        distance = sorted(abs(a - b) for a, b in zip(own, network, strict=True))
        blamed = _is_private(network) if _is_private(network) != _is_private(own) else known[1][0] == name
        if distance != [0, 1] or not blamed:
            return None
        whose, usual = f"that of {other}", network
    else:
        (usual, count), *_ = Counter(network for _, network in known).most_common(1)
        same = sum(network == own for _, network in known)
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
