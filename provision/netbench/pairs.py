"""The order in which pairs of nodes are measured, and the slow nodes and links. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 0.75  # of a typical node's rate with its best partner: a pair below it is slow
SIZE = 64 << 20  # bytes at most in each direction: enough that the start of a transfer does not matter

Pair = tuple[str, str]


@dataclass(frozen=True)
class Judgement:
    """The slow nodes and links.

    Attributes:
        usual: bytes a second of a typical node with its best partner.
        nodes: slow nodes, each with the numbers of its slow pairs and of its pairs.
        links: slow pairs that no slow node explains.
        compared: whether there are several pairs to compare.
    """

    usual: float
    nodes: Mapping[str, tuple[int, int]]
    links: tuple[Pair, ...]
    compared: bool = True


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every node meets every other node once, with as many pairs at a time as possible (circle method).

    With an odd count, one node rests in every round.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        round_ = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        found.append(sorted(round_))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def rates(events: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[Pair, float]:
    """Bytes a second in each direction of every pair of nodes, summed over its processes.

    Only the better half of a pair's iterations counts, because other programs may use the network at the same time.
    """
    found: dict[Pair, float] = defaultdict(float)
    for event in events:
        if event["event"] == "pair":
            better = statistics.median_low(sorted(event["times"])[: (len(event["times"]) + 1) // 2])
            found[names[event["a"]], names[event["b"]]] += event["bytes"] / better
    return dict(found)


def slow_pairs(measured: Mapping[Pair, float], slow: float = SLOW) -> list[Pair]:
    """The slow pairs, the slowest first; empty if there is only one pair."""
    if len(measured) < 2:
        return []
    limit = slow * usual(measured)
    return sorted((pair for pair, rate in measured.items() if rate < limit), key=lambda pair: measured[pair])


def usual(measured: Mapping[Pair, float]) -> float:
    """A typical node's rate with its best partner: the median over the nodes.

    The median over the pairs would fail with three nodes, where one slow node is in two of the three pairs.
    """
    best: dict[str, float] = {}
    for pair, rate in measured.items():
        for name in pair:
            best[name] = max(rate, best.get(name, 0.0))
    return statistics.median_high(best.values()) if best else 0.0


def judge(measured: Mapping[Pair, float], slow: float = SLOW) -> Judgement:
    """Find the slow nodes, then the slow links that they do not explain.

    A node is slow if all its pairs are slow, or if half of its pairs are slow while its partners are slow with no other
    node.
    """
    level = usual(measured)
    if len(measured) < 2:
        return Judgement(level, {}, (), compared=False)
    bad = slow_pairs(measured, slow)
    pairs_of: dict[str, dict[str, float]] = defaultdict(dict)
    for (a, b), rate in measured.items():
        pairs_of[a][b] = pairs_of[b][a] = rate
    nodes = [name for name, rates in pairs_of.items() if max(rates.values()) < slow * level]
    left = _without(bad, nodes)
    while (name := _hub(left, pairs_of)) is not None:
        nodes.append(name)
        left = _without(left, [name])
    counts = {name: (sum(name in pair for pair in bad), len(pairs_of[name])) for name in nodes}
    return Judgement(level, counts, tuple(left))


def _without(pairs: Iterable[Pair], nodes: Collection[str]) -> list[Pair]:
    return [pair for pair in pairs if not set(pair) & set(nodes)]


def _hub(bad: Sequence[Pair], pairs_of: Mapping[str, Mapping[str, float]]) -> str | None:
    """A node in several slow pairs whose partners are in no other slow pair."""
    partners: dict[str, set[str]] = defaultdict(set)
    for a, b in bad:
        partners[a].add(b)
        partners[b].add(a)
    for name, met in partners.items():
        if len(met) >= 2 and 2 * len(met) >= len(pairs_of[name]) and all(len(partners[each]) == 1 for each in met):
            return name
    return None
