"""Selects the nodes of a command, and folds names: ``gpu[01-04]``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.inventory.sets import UnknownError, members, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from provision.model import Inventory, Node


def select(
    inventory: Inventory, *, count: int | None = None, limit: str | None = None, exclude: str | None = None
) -> tuple[Node, ...]:
    """The nodes that a command works on, in the inventory's order.

    Args:
        inventory: the cluster.
        count: the first so many of those that ``limit`` and ``exclude`` leave.
        limit: only these, such as ``gpu[01-04,07]``, ``gpu*`` or ``@storage``; see ``sets``.
        exclude: not these.

    Raises:
        UsageError: an unknown name, an expression that is none, no node left, or fewer than ``count``.
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
    """What the parts of an expression that match nothing are."""
    groups = [text for text in error.others if text.startswith("@")]
    patterns = [text for text in error.others if not text.startswith("@")]
    parts = [f"no node is called {shown(fold(sorted(error.names)))}"] if error.names else []
    parts += [f"no node matches {shown(', '.join(patterns))}"] if patterns else []
    parts += [f"there is no group {shown(', '.join(groups))}"] if groups else []
    return "; ".join(parts)


def _all(inventory: Inventory) -> str:
    """Every node, and every group."""
    groups = ", ".join(f"@{name}" for name in list(inventory.groups)[:20])
    return fold(node.name for node in inventory.nodes) + (f" and the groups {groups}" if groups else "")


def fold(names: Iterable[str]) -> str:
    """``gpu01, gpu02, gpu07`` -> ``gpu[01-02,07]``; names that have no such form are joined by commas."""
    unique = list(dict.fromkeys(names))
    if all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in unique):
        try:
            return str(NodeSet.fromlist(unique, resolver=RESOLVER_NOGROUP))
        except NodeSetException:
            pass
    return ",".join(unique)
