"""Sets of nodes as text, and the nodes of a command: ``gpu[01-04],@storage,!gpu03``, ``gpu*``, ``@rack1&@a800``.

The operators are ClusterShell's, from left to right: ``,`` is union, ``!`` difference, ``&`` intersection. Unlike
in ClusterShell's NodeSet, the size of a range is limited (``names.MAX_NODES``).
"""

from __future__ import annotations

import difflib
import re
from fnmatch import translate
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.inventory.names import expand

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from provision.model import Inventory, Node

ALL = "all"  # the predefined group of every node
MAX_LENGTH = 65_536  # characters; 4,096 names of 15 letters

_TOKEN = re.compile(r"\s*([,!&]|(?:\[[^\[\]]*\]|[^\s,!&\[\]])+|\S)")


class UnknownError(ValueError):
    """Names, groups or patterns that match nothing.

    Attributes:
        names: names that no node has.
        others: groups that do not exist and patterns without a match, as written.
    """

    def __init__(self, names: Sequence[str], others: Sequence[str]) -> None:
        super().__init__(", ".join([*names, *others]))
        self.names = names
        self.others = others


def members(expression: str, nodes: Iterable[str], groups: Mapping[str, Collection[str]]) -> set[str]:
    """The names of an expression's nodes.

    Args:
        expression: the text; an empty one has no nodes.
        nodes: the names of all nodes.
        groups: the names of the nodes of each group.

    Raises:
        UnknownError: parts of the expression match nothing.
        ValueError: the expression is invalid; the message says why.
    """
    everything = frozenset(nodes)
    found: set[str] = set()
    names: dict[str, None] = {}
    others: dict[str, None] = {}
    for operator, part in parts(expression):
        if not operator:
            found = set(everything) if part.startswith("!") else set()
        atom = part.removeprefix("!") if not operator else part
        those = _atom(atom, everything, groups, names, others)
        if operator == "&":
            found &= those
        elif operator == "!" or (not operator and part.startswith("!")):
            found -= those
        else:
            found |= those
    if names or others:
        raise UnknownError(list(names), list(others))
    return found


def references(expression: str, groups: Collection[str]) -> set[str]:
    """The existing groups that an expression names.

    Raises:
        ValueError: the expression is invalid.
    """
    named = (part.removeprefix("!") for _, part in parts(expression))
    return {
        group
        for part in named
        if part.startswith("@")
        for pattern in expand(part[1:])
        if pattern not in {ALL, "*"}
        for group in _match_names(pattern, groups)
    }


def suggestion(error: UnknownError, nodes: Sequence[str], groups: Iterable[str]) -> str:
    """``did you mean gpu05?`` if every unknown part is close to a known one; else empty."""
    known = [*nodes, *(f"@{group}" for group in (*groups, ALL))]
    close: dict[str, None] = {}
    for text in [*error.names, *error.others][:20]:
        choices = [f"@{text}"] if f"@{text}" in known else difflib.get_close_matches(text, known, n=1)
        if not choices:
            return ""
        close |= dict.fromkeys(choices)
    return f"did you mean {shown(', '.join(close))}?" if close else ""


def parts(expression: str) -> Iterator[tuple[str, str]]:
    """Each part with its operator. The first part has none; if it starts with ``!``, it means all nodes but these."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"it is longer than {MAX_LENGTH:,} characters")
    operator, first, pending = "", True, ""
    for token in _TOKEN.findall(expression):
        if token in {",", "!", "&"}:
            possible = {"": "!"} if first else {"": ",!&", ",": "!&"}
            if token not in possible.get(pending, ""):
                raise ValueError(f"a name or a group is missing before {token}")
            pending = token
            continue
        if token in {"[", "]"}:
            raise ValueError("unmatched bracket: write a range as gpu[01-04,07]")
        operator = "" if first else pending or ","
        yield operator, f"!{token}" if first and pending == "!" else token
        first, pending = False, ""
    if pending:
        raise ValueError(f"a name or a group is missing after {pending}")


def _atom(
    text: str,
    everything: frozenset[str],
    groups: Mapping[str, Collection[str]],
    names: dict[str, None],
    others: dict[str, None],
) -> set[str]:
    """The nodes of one part. Records unknown names in ``names``, other parts without a match in ``others``."""
    found: set[str] = set()
    if text.startswith("@"):
        for pattern in expand(text[1:]):
            matching = [ALL] if pattern in {ALL, "*"} else _match_names(pattern, groups)
            if not matching:
                others[f"@{pattern}"] = None
            for group in matching:
                found.update(everything if group == ALL else groups[group])
        return found
    for pattern in expand(text):
        if pattern in everything:
            found.add(pattern)
        elif "*" in pattern or "?" in pattern:
            matching = _match_names(pattern, everything)
            if not matching:
                others[pattern] = None
            found.update(matching)
        else:
            names[pattern] = None
    return found


def _match_names(pattern: str, known: Collection[str]) -> list[str]:
    if "*" in pattern or "?" in pattern:
        match = re.compile(translate(re.sub(r"\*+", "*", pattern))).match
        return [name for name in known if match(name)]
    return [pattern] if pattern in known else []


def select(
    inventory: Inventory, *, count: int | None = None, limit: str | None = None, exclude: str | None = None
) -> tuple[Node, ...]:
    """The command's nodes, in the inventory's order.

    Args:
        inventory: the cluster.
        count: how many nodes to take, after ``limit`` and ``exclude``.
        limit: the nodes to take, such as ``gpu[01-04,07]``, ``gpu*`` or ``@storage``; see the module.
        exclude: the nodes to skip.

    Raises:
        UsageError: a name is unknown, an expression is invalid, or fewer than ``count`` nodes are left, or none.
    """
    wanted = _names(inventory, "--limit", limit) if limit is not None else {node.name for node in inventory.nodes}
    unwanted = _names(inventory, "--exclude", exclude) if exclude is not None else set()
    left = tuple(node for node in inventory.nodes if node.name in wanted - unwanted)
    if not left:
        raise UsageError("no node is selected", hint=f"{inventory.path.name} has {_all(inventory)}")
    if count is None:
        return left
    if count < 1:
        raise UsageError(f"--nodes {count}: at least one node is needed", hint=f"for all nodes: --nodes {len(left)}")
    if count > len(left):
        file, names = inventory.path.name, fold(node.name for node in left)
        if len(left) < len(inventory.nodes):
            there, more = f"--limit and --exclude leave {len(left)} ({names})", f"name more of {_all(inventory)}"
        else:
            there, more = f"{file} has {len(left)} ({names})", f"add the others to {file}"
        raise UsageError(f"--nodes {count}: {there}", hint=f"--nodes {len(left)}, or {more}")
    return left[:count]


def _names(inventory: Inventory, option: str, expression: str) -> set[str]:
    written = f"{option} {shown(expression)}" if expression else f"{option} ''"
    known = [node.name for node in inventory.nodes]
    has = f"{inventory.path.name} has {_all(inventory)}"
    try:
        names = members(expression, known, inventory.groups)
    except UnknownError as error:
        advice = suggestion(error, known, inventory.groups)
        raise UsageError(f"{written}: {_unknown(error)}", hint=f"{advice} {has}".lstrip()) from error
    except ValueError as error:
        raise UsageError(f"{written}: not a set of nodes: {error}", hint=f"write it as {_all(inventory)}") from error
    if not names and not expression.strip():
        raise UsageError(f"{written}: names no node", hint=has)
    return names


def _unknown(error: UnknownError) -> str:
    """The parts of an expression that match nothing."""
    groups = [text for text in error.others if text.startswith("@")]
    patterns = [text for text in error.others if not text.startswith("@")]
    parts = [f"no node is called {shown(fold(sorted(error.names)))}"] if error.names else []
    parts += [f"no node matches {shown(', '.join(patterns))}"] if patterns else []
    parts += [f"there is no group {shown(', '.join(groups))}"] if groups else []
    return "; ".join(parts)


def _all(inventory: Inventory) -> str:
    """The inventory's nodes and groups, as text."""
    groups = ", ".join(f"@{name}" for name in list(inventory.groups)[:20])
    return fold(node.name for node in inventory.nodes) + (f" and the groups {groups}" if groups else "")


def fold(names: Iterable[str]) -> str:
    """``gpu01, gpu02, gpu07`` -> ``gpu[01-02,07]``; other names are joined by commas."""
    unique = list(dict.fromkeys(names))
    if all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in unique):
        try:
            return str(NodeSet.fromlist(unique, resolver=RESOLVER_NOGROUP))
        except NodeSetException:
            pass
    return ",".join(unique)
