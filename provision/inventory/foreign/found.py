"""What was found in another tool's file."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.inventory.choosing import Wanted
from provision.inventory.document import shown
from provision.inventory.groups import MAX_GROUPS, group_problem
from provision.inventory.names import check_address, check_name


@dataclass(frozen=True)
class Found:
    """Nodes of another tool's file.

    Attributes:
        kind: what kind of file it is, for people.
        hosts: the nodes.
        ssh: ``user``, ``port`` and ``key`` where all nodes have the same.
        groups: the groups' names, and the places of their nodes in ``hosts``.
        notes: what has no counterpart and is left out, one sentence each with its lines.
        problems: what is not understood, with its line; then ``hosts`` is of no use.
        name: the file's.
    """

    kind: str
    hosts: tuple[Wanted, ...]
    ssh: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    name: str = ""

    def kept_groups(self, names: Sequence[str]) -> tuple[Mapping[str, tuple[str, ...]], tuple[str, ...]]:
        """The groups as the inventory can have them, and a sentence for each that it cannot.

        Args:
            names: the names that the nodes have in the inventory, in the order of ``hosts``.
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
    """The node that another tool calls ``name``; a bare address is no name.

    Raises:
        ValueError: it can be neither.
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
    """The hosts without what all of them have in common, and that."""
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
