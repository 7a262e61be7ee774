"""Writes nodes as the text of an inventory, with ranges for consecutive nodes. Pure."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from provision.inventory.document import shown
from provision.inventory.selection import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from provision.model import Node

HEADER = "clusterctl's inventory; inventory.example.yaml shows every key."
_LINE = 118  # columns of a comment


def text(
    nodes: Sequence[Node],
    *,
    prefix: str,
    ssh: Mapping[str, Any],
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
    notes: Iterable[str] = (),
    ranges: bool = True,
) -> str:
    """The inventory file.

    Args:
        nodes: the nodes in order; the first node of a run gets rank 0.
        prefix: see ``model.Inventory``.
        ssh: the section of that name; skipped if empty.
        groups: names of nodes by group.
        notes: sentences for comments at the top.
        ranges: whether consecutive nodes share an entry.
    """
    data: dict[str, Any] = {"prefix": prefix}
    if ssh:
        data["ssh"] = dict(ssh)
    data["nodes"] = dict(_entry(run) for run in (runs(nodes) if ranges else [[node] for node in nodes]))
    if groups:
        data["groups"] = {name: fold(members) for name, members in groups.items()}
    comments = [HEADER, *(shown(note, limit=_LINE) for note in notes)]
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000)
    return "".join(f"# {comment}\n" for comment in comments) + body


def runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Groups consecutive nodes that fit one entry: names and addresses count up together, and all else is equal."""
    found: list[list[Node]] = []
    steps: list[tuple[_Step | None, ...]] = []
    for node in nodes:
        if found:
            step = _step(found[-1][-1], node)
            if step is not None and (len(found[-1]) == 1 or steps[-1] == step):
                steps[-1] = step
                found[-1].append(node)
                continue
        found.append([node])
        steps.append(())
    return found


_Step = tuple[int, tuple[str, ...]]  # the index of the part that counts up, and the other parts


def _step(one: Node, two: Node) -> tuple[_Step | None, ...] | None:
    """How the texts of two nodes differ; None if no range contains both."""
    if (one.user, one.port, one.gpus) != (two.user, two.port, two.gpus):
        return None
    steps: list[_Step | None] = []
    for first, second in ((one.name, two.name), (one.address, two.address), (one.data_address, two.data_address)):
        if first is None and second is None:
            steps.append(None)
            continue
        step = _counted(first, second) if first is not None and second is not None else None
        if step is None:
            return None
        steps.append(step)
    return tuple(steps)


def _counted(one: str, two: str) -> _Step | None:
    """The step from ``one`` to ``two`` if one number rises by one; None if anything else differs."""
    first, second = re.split(r"([0-9]+)", one), re.split(r"([0-9]+)", two)
    if len(first) != len(second):
        return None
    differ = [index for index, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(differ) != 1 or not differ[0] % 2:
        return None
    place = differ[0]
    low, high = first[place], second[place]
    padded = len(low) == len(high) if low.startswith("0") and low != "0" else not high.startswith("0")
    if int(high) != int(low) + 1 or not padded or len(high) > 9:
        return None
    return place, (*first[:place], "", *first[place + 1 :])


def _entry(group: Sequence[Node]) -> tuple[str, Any]:
    first, last = group[0], group[-1]
    address = _range(first.address, last.address)
    more: dict[str, Any] = {}
    if first.data_address and last.data_address:
        more["data_address"] = _range(first.data_address, last.data_address)
    more |= {key: value for key in ("user", "port", "gpus") if (value := getattr(first, key)) is not None}
    return _range(first.name, last.name), {"address": address, **more} if more else address


def _range(first: str, last: str) -> str:
    """``gpu01``, ``gpu04`` -> ``gpu[01-04]``."""
    if first == last:
        return first
    parts, ends = re.split(r"([0-9]+)", first), re.split(r"([0-9]+)", last)
    return "".join(a if a == b else f"[{a}-{b}]" for a, b in zip(parts, ends, strict=True))
