"""Which nodes try to reach which, and who is to blame when some cannot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from provision.model import Node

EVERY_PAIR = 16  # nodes up to which all pairs are tried; beyond, rank 0 and the neighbours in a ring


def pairs(nodes: Sequence[Node]) -> tuple[tuple[Node, Node], ...]:
    """Who connects to whom, each direction on its own.

    All pairs of a small cluster; of a large one every node with rank 0 and with the next, so that each has three
    partners or more and the work grows with the nodes, not with their pairs.
    """
    if len(nodes) <= EVERY_PAIR:
        return tuple((one, other) for one in nodes for other in nodes if one is not other)
    found: dict[tuple[str, str], tuple[Node, Node]] = {}
    for index, node in enumerate(nodes):
        for other in (nodes[0], nodes[(index + 1) % len(nodes)]):
            if node is not other:
                found[node.name, other.name] = (node, other)
                found[other.name, node.name] = (other, node)
    return tuple(found.values())


def partners(nodes: Sequence[Node], node: Node) -> tuple[str, ...]:
    """The addresses that ``node`` tries to reach."""
    return tuple(other.train_address for one, other in pairs(nodes) if one.name == node.name)


def blamed(tried: Iterable[tuple[str, str]], failed: Iterable[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The nodes at which failed connections break off, each with the pairs (from, to) that it explains.

    A node to which nobody gets through explains all of that, then one that gets through to nobody. What is left over is
    laid to the node that was to be reached: nearly every firewall looks at what comes in.
    """
    tried = set(tried)
    rest = list(dict.fromkeys(failed))
    found: dict[str, list[tuple[str, str]]] = {}
    for side in (1, 0):
        for name in dict.fromkeys(pair[side] for pair in rest):
            mine = [pair for pair in rest if pair[side] == name]
            whole = {pair for pair in tried if pair[side] == name}
            if whole == set(mine) and (side or len(whole) > 1):
                found.setdefault(name, []).extend(mine)
        rest = [pair for pair in rest if not any(pair in mine for mine in found.values())]
    for pair in rest:
        found.setdefault(pair[1], []).append(pair)
    return found
