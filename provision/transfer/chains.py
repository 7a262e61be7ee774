"""Which nodes pass bytes on to which. Pure: from what the nodes can do and which ways have failed to the lanes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True)
class Place:
    """A node where lanes are formed.

    Attributes:
        name: of the node.
        passes: whether it can hand bytes on.
        receives: whether another node may log in to it.
    """

    name: str
    passes: bool
    receives: bool


def form(places: Sequence[Place], refused: Collection[tuple[str, str]], *, relay: bool) -> list[list[str]]:
    """The lanes: lists of names, of which the first is reached from here and each of the others by the one before.

    Args:
        places: the nodes that need the same wire form, in the order of the inventory.
        refused: ways ``(from, to)`` that are known not to work.
        relay: whether nodes may pass bytes on at all.

    Returns:
        As few lanes as a greedy search finds; nodes that pass nothing on stand at the end of one.
    """
    if not relay:
        return [[place.name] for place in places]
    by_name = {place.name: place for place in places}

    def leads(before: str, behind: str) -> bool:
        return by_name[before].passes and by_name[behind].receives and (before, behind) not in refused

    lanes: list[list[str]] = []
    for place in sorted(places, key=lambda place: not place.passes):  # stable: else in the inventory's order
        joined = next((lane for lane in lanes if leads(lane[-1], place.name)), None)
        if joined:
            joined.append(place.name)
        else:
            lanes.append([place.name])
    # A node that could not follow those that came before it may follow one that came later.
    while pair := next(((a, b) for a, b in itertools.permutations(lanes, 2) if leads(a[-1], b[0])), None):
        pair[0].extend(pair[1])
        lanes.remove(pair[1])
    return lanes


def ways(lanes: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Every way from one node to the next."""
    return [pair for lane in lanes for pair in itertools.pairwise(lane)]
