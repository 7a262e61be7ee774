"""Which pairs of nodes are measured when, and which node or link is slow. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 0.75  # of what a usual node reaches with its best partner: below it a pair is slow
SIZE = 64 << 20  # bytes at most in each direction: enough that the start of a transfer does not count

Pair = tuple[str, str]


@dataclass(frozen=True)
class Judgement:
    """What the pairs tell.

    Attributes:
        usual: bytes a second that a usual node reaches with its best partner.
        nodes: slow ones; each with how many of its pairs are slow, and how many it has.
        links: slow pairs that no slow node explains.
        compared: whether there is more than one pair, without which nothing can be called slow.
    """

    usual: float
    nodes: Mapping[str, tuple[int, int]]
    links: tuple[Pair, ...]
    compared: bool = True


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once, as many at a time as there can be (the circle method).

    With an odd count one rests in every round.
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
    """Bytes a second in each direction of every pair of nodes: what its processes do together.

    It counts what a pair reached in the better half of its iterations: others may use the network at the same time, and
    that is not what is asked here.
    """
    found: dict[Pair, float] = defaultdict(float)
    for event in events:
        if event["event"] == "pair":
            better = statistics.median_low(sorted(event["times"])[: (len(event["times"]) + 1) // 2])
            found[names[event["a"]], names[event["b"]]] += event["bytes"] / better
    return dict(found)


def slow_pairs(measured: Mapping[Pair, float], slow: float = SLOW) -> list[Pair]:
    """The pairs that are slow, the slowest first; of one pair nothing can be said."""
    if len(measured) < 2:
        return []
    limit = slow * usual(measured)
    return sorted((pair for pair, rate in measured.items() if rate < limit), key=lambda pair: measured[pair])


def usual(measured: Mapping[Pair, float]) -> float:
    """What a usual node reaches with its best partner: the median of that over the nodes.

    One slow node of three has two of the three pairs, so the pairs have no majority, but the nodes have.
    """
    best: dict[str, float] = {}
    for pair, rate in measured.items():
        for name in pair:
            best[name] = max(rate, best.get(name, 0.0))
    return statistics.median_high(best.values()) if best else 0.0


def judge(measured: Mapping[Pair, float], slow: float = SLOW) -> Judgement:
    """Name the slow nodes, then the slow links that they do not explain.

    A node is slow when it is so with everybody, or when it is in several slow pairs that no other node is in again and
    that are half of its pairs.
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
    """The node where several slow pairs meet, while none of those whom it meets there is in another."""
    partners: dict[str, set[str]] = defaultdict(set)
    for a, b in bad:
        partners[a].add(b)
        partners[b].add(a)
    for name, met in partners.items():
        if len(met) >= 2 and 2 * len(met) >= len(pairs_of[name]) and all(len(partners[each]) == 1 for each in met):
            return name
    return None
