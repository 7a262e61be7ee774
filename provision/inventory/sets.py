"""Sets of nodes as text: ``gpu[01-04],@storage,!gpu03``, ``gpu*``, ``@rack1&@a800``. Pure.

The operators are ClusterShell's, from left to right: ``,`` is union, ``!`` difference, ``&`` intersection. Unlike
in ClusterShell's NodeSet, the size of a range is limited (``names.MAX_NODES``).
"""

from __future__ import annotations

import difflib
import re
from fnmatch import translate
from typing import TYPE_CHECKING

from provision.inventory.document import shown
from provision.inventory.names import expand

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

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
        for group in _matching(pattern, groups)
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
            matching = [ALL] if pattern in {ALL, "*"} else _matching(pattern, groups)
            if not matching:
                others[f"@{pattern}"] = None
            for group in matching:
                found.update(everything if group == ALL else groups[group])
        return found
    for pattern in expand(text):
        if pattern in everything:
            found.add(pattern)
        elif "*" in pattern or "?" in pattern:
            matching = _matching(pattern, everything)
            if not matching:
                others[pattern] = None
            found.update(matching)
        else:
            names[pattern] = None
    return found


def _matching(pattern: str, known: Collection[str]) -> list[str]:
    if "*" in pattern or "?" in pattern:
        match = re.compile(translate(re.sub(r"\*+", "*", pattern))).match
        return [name for name in known if match(name)]
    return [pattern] if pattern in known else []
