"""The nodes and groups of another tool's file."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.inventory.document import shown
from provision.inventory.groups import MAX_GROUPS, group_problem
from provision.inventory.names import check_address, check_name
from provision.inventory.new_nodes import Wanted


@dataclass(frozen=True)
class Found:
    """The nodes and groups of another tool's file.

    Attributes:
        kind: the file's kind, for messages.
        hosts: the nodes.
        ssh: ``user``, ``port`` and ``key``, if equal for all nodes.
        groups: the groups' names, and the indexes of their nodes in ``hosts``.
        notes: a sentence for each skipped entry, with its lines.
        problems: the mistakes with their lines; ``hosts`` is then invalid.
        name: the file's name.
    """

    kind: str
    hosts: tuple[Wanted, ...]
    ssh: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    name: str = ""

    def kept_groups(self, names: Sequence[str]) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
        """The groups that the inventory can have, and a sentence for each skipped group.

        Args:
            names: the nodes' names in the inventory, in the order of ``hosts``.
        """
        kept: dict[str, tuple[str, ...]] = {}
        notes: list[str] = []
        for name, places in self.groups.items():
            problem = group_problem(name, set(names))
            if not places:
                problem = "it has no host"
            elif len(kept) == MAX_GROUPS:
                problem = f"an inventory has at most {MAX_GROUPS:,}"
            if problem:
                notes.append(f"the group {shown(name)} is skipped: {problem}")
            else:
                kept[name] = tuple(names[place] for place in places)
        return kept, tuple(notes)


def host(name: str, address: str | None = None, *, origin: str = "") -> Wanted:
    """The node that another tool calls ``name``; a bare address is not a name.

    Raises:
        ValueError: the name or the address is invalid.
    """
    address = address or name
    check_address(address)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        check_name(name)
        return Wanted(address, name, origin=origin)
    return Wanted(address, origin=origin)


def shared(hosts: Iterable[Wanted]) -> tuple[tuple[Wanted, ...], dict[str, Any]]:
    """The hosts without their common values, and the common values."""
    hosts = tuple(hosts)
    common: dict[str, Any] = {}
    users, ports = {each.user for each in hosts}, {each.port for each in hosts}
    if len(users) == 1 and None not in users:
        common["user"] = users.pop()
        hosts = tuple(replace(each, user=None) for each in hosts)
    if len(ports) == 1 and None not in ports:
        common["port"] = ports.pop()
        hosts = tuple(replace(each, port=None) for each in hosts)
    return hosts, common


def lines(numbers: Iterable[int]) -> str:
    """``line 3``, ``lines 3-5, 9``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"line {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"lines {text}"
