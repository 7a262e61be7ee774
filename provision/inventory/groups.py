"""The inventory's ``groups:`` section: names for sets of nodes and of other groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.inventory.document import shown
from provision.inventory.names import check_name
from provision.inventory.schema import as_text
from provision.inventory.selection import ALL, UnknownError, members, references, suggestion

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from provision.inventory.document import Document, Place

MAX_GROUPS = 1000

_FORM = "write GROUP: NODES, such as `storage: gpu[01-02]`"


def read_groups(document: Document, data: object, nodes: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """The nodes of each group, in the inventory's order. Records mistakes in ``document``."""
    if data is None:
        return {}
    if not isinstance(data, dict):
        document.mistake(("groups",), f"must be a mapping: {_FORM}")
        return {}
    if len(data) > MAX_GROUPS:
        document.mistake(("groups",), f"has more than {MAX_GROUPS:,} groups")
        return {}
    written: dict[str, str] = {}
    below: dict[str, set[str]] = {}
    known = set(nodes)
    for name, value in data.items():
        text, below[name], problem = _read_group(name, value, known, data.keys())
        if problem:
            document.mistake(("groups", name), problem)
        else:
            written[name] = text
    return _resolve_group(document, written, below, nodes, ("groups",)) if nodes else {}


def resolve(document: Document, written: Mapping[str, str], nodes: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """The nodes of each group of another tool's file. Records mistakes in ``document`` under the group's name."""
    below = {name: references(text, written.keys()) for name, text in written.items()}
    return _resolve_group(document, written, below, nodes, ())


def _read_group(name: str, value: object, nodes: set[str], groups: Collection[str]) -> tuple[str, set[str], str]:
    """A group's text, the groups that it names, and its mistake."""
    try:
        if problem := group_problem(name, nodes):
            return "", set(), problem
        text = _expression(value)
        return text, references(text, groups), ""
    except ValueError as error:
        return "", set(), str(error)


def group_problem(name: str, nodes: Collection[str]) -> str:
    """Why a group cannot have this name; empty if it can."""
    try:
        check_name(name)
    except ValueError:
        return f"{shown(name) or 'nothing'} is not a group's name (letters, digits, . _ - only)"
    if name == ALL:
        return f"@{ALL} is every node already: choose another name"
    if name in nodes:
        return f"{name} is the name of a node: choose another name for the group"
    return ""


def _expression(value: object) -> str:
    """The text of a set of nodes, from one text or a list of them."""
    if value is None:
        raise ValueError(f"names no node: {_FORM}")
    texts = [as_text(each) for each in value] if isinstance(value, list) else [as_text(value)]
    if not texts:
        raise ValueError(f"names no node: {_FORM}")
    return ",".join(texts)


def _resolve_group(
    document: Document,
    written: Mapping[str, str],
    below: Mapping[str, set[str]],
    nodes: Sequence[str],
    place: Place,
) -> dict[str, tuple[str, ...]]:
    """Resolves each group after the groups that it names. The groups left at the end form a cycle."""
    found: dict[str, tuple[str, ...]] = {}
    broken = below.keys() - written.keys()
    left = dict(written)
    while ready := [name for name in left if not (below[name] - broken) & left.keys()]:
        for name in ready:
            text = left.pop(name)
            try:
                if not below[name] & broken:  # else the mistake is in the other group
                    inside = members(text, nodes, found)
                    if not inside:
                        raise ValueError(f"{shown(text)} has no node")  # noqa: TRY301
                    found[name] = tuple(node for node in nodes if node in inside)
                    continue
            except UnknownError as error:
                document.mistake((*place, name), _unknown(error, nodes, written))
            except ValueError as error:
                document.mistake((*place, name), str(error))
            broken = broken | {name}
    for name in left:
        document.mistake((*place, name), f"contains itself: {_cycle(name, below, left.keys())}")
    return {name: found[name] for name in written if name in found}


def _unknown(error: UnknownError, nodes: Sequence[str], groups: Mapping[str, str]) -> str:
    parts = [f"no node is called {shown(name)}" for name in error.names[:3]]
    parts += [
        f"there is no group {shown(text)}" if text.startswith("@") else f"no node matches {shown(text)}"
        for text in error.others[:3]
    ]
    advice = suggestion(error, nodes, groups)
    return "; ".join(parts) + (f"; {advice}" if advice else "")


def _cycle(name: str, below: Mapping[str, set[str]], left: Collection[str]) -> str:
    """``@a -> @b -> @a``: the path from a group back to itself, or into the cycle that it depends on."""
    path = [name]
    while len(set(path)) == len(path):
        path.append(min(each for each in below[path[-1]] if each in left))
    return " -> ".join(f"@{shown(each)}" for each in path[:8]) + (" …" if len(path) > 8 else "")
