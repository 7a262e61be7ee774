"""Compares the nodes with one another and names the odd one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

from provision.checks import Judgement, Judgements, ok
from provision.inventory import fold
from provision.model import Verdict

T = TypeVar("T", bound=Hashable)


def groups(values: Mapping[str, T]) -> dict[T, tuple[str, ...]]:
    """Which nodes have which value, the most frequent first; equally frequent ones in the order of the nodes."""
    found: dict[T, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return {value: tuple(names) for value, names in sorted(found.items(), key=lambda item: -len(item[1]))}


def majority(values: Mapping[str, T]) -> T | None:
    """The value that more than half of at least three nodes have, or that all have; None where there is none.

    Of two nodes that differ, either may be wrong.
    """
    found = groups(values)
    return next(iter(found)) if found and _settled(found, len(values)) else None


def odd(
    values: Mapping[str, T],
    *,
    fix: str,
    noun: str = "",
    verdict: Verdict = "WARN",
    show: Callable[[T], str] = str,
    expected: str = "the same on every node",
) -> Judgements:
    """A finding for every node: OK where it has what most have, else ``verdict`` and how it differs.

    Without a strict majority among three nodes or more, every node gets ``verdict`` and the values of all.

    Args:
        values: what each node has.
        fix: what to do about a node that differs.
        noun: the noun that stands before the value, such as ``driver``.
        verdict: for nodes that differ.
        show: a value as text.
        expected: what it should be; where there is a majority, its value is named as well.
    """
    found = groups(values)
    settled = _settled(found, len(values))
    noun = f"{noun} " if noun else ""
    if not settled:
        observed = "; ".join(f"{fold(names)} {_have(names)} {noun}{show(value)}" for value, names in found.items())
        for name in values:
            yield name, Judgement(verdict, observed, expected, fix)
        return
    for name, value in values.items():
        common, holders = next(iter(found.items()))
        if value == common:
            yield name, ok(f"{noun}{show(value)}")
            continue
        others = len(holders)
        observed = f"{noun}{show(value)}, {others} of the other {len(values) - 1} nodes have {show(common)}"
        if others == len(values) - 1:
            observed = f"{noun}{show(value)}, the other {others} nodes have {show(common)}"
        yield name, Judgement(verdict, observed, f"{noun}{show(common)}", fix)


def close(values: Mapping[str, float], share: float) -> dict[str, float]:
    """``values`` with those that lie within ``share`` of their group's smallest replaced by the group's median.

    So figures that are never quite equal, such as the size of the memory, can be compared by ``majority`` and ``odd``.
    """
    bands: list[list[float]] = []
    for value in sorted(values.values()):
        if bands and value - bands[-1][0] <= share * abs(bands[-1][0]):
            bands[-1].append(value)
        else:
            bands.append([value])
    middle = {value: median(band) for band in bands for value in band}
    return {name: middle[value] for name, value in values.items()}


def _settled(found: Mapping[T, tuple[str, ...]], nodes: int) -> bool:
    """Whether the first of the groups is a majority."""
    return len(found) <= 1 or (nodes >= 3 and 2 * len(next(iter(found.values()))) > nodes)


def _have(names: tuple[str, ...]) -> str:
    return "has" if len(names) == 1 else "have"
