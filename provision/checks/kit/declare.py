"""Checks as declarations: equal on all nodes, above or below a threshold, or a function that judges one node."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Any, NamedTuple, TypeVar

from provision.checks import Answer, Answers, Check, Judgement, Judgements, Plan, call, fail, judge_of, ok, warn
from provision.checks.kit.host import read_all, unread
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
    return next(iter(found)) if found and _has_majority(found, len(values)) else None


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
    settled = _has_majority(found, len(values))
    noun = f"{noun} " if noun else ""
    if not settled:
        observed = "; ".join(
            f"{fold(names)} {'has' if len(names) == 1 else 'have'} {noun}{show(value)}"
            for value, names in found.items()
        )
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


def _has_majority(found: Mapping[T, tuple[str, ...]], nodes: int) -> bool:
    """Whether the first of the groups is a majority."""
    return len(found) <= 1 or (nodes >= 3 and 2 * len(next(iter(found.values()))) > nodes)


def equal(
    check: str,
    title: str,
    *,
    read: Callable[[Answer], T | None],
    fix: str,
    noun: str = "",
    verdict: Verdict | Callable[[Plan], Verdict] = "WARN",
    show: Callable[[T], str] = str,
    near: Callable[[Mapping[str, Any], Mapping[str, float]], Mapping[str, T]] | None = None,
    **options: Any,
) -> Check:
    """A check that every node has the same value. Without a majority among three nodes, all nodes are named.

    Args:
        check: the id.
        title: what is true of healthy nodes.
        read: the value in an answer; None makes the node UNKNOWN.
        fix: what to do about a node that differs.
        noun: stands before the value, such as ``driver``.
        verdict: for a node that differs; a function where it depends on the inventory.
        show: a value as text.
        near: makes values equal that differ by less than a limit.
        options: further fields of ``Check``.
    """

    def judge(plan: Plan, answers: Answers) -> Judgements:
        values = yield from read_all(answers, read)
        level = verdict(plan) if callable(verdict) else verdict
        compared = near(values, plan.limits) if near else values
        yield from odd(compared, fix=fix, noun=noun, verdict=level, show=show)

    return Check(check, title, judge=judge, **options)


class Level(NamedTuple):
    """A value to compare with thresholds, its text, and what is particular to this node."""

    value: float
    text: str
    exempt: str = ""
    fix: str = ""
    expected: str = ""


def threshold(
    check: str,
    title: str,
    *,
    read: Callable[..., Level | Judgement | None],
    expected: str = "",
    fix: str = "",
    least: str = "",
    fail_below: str = "",
    most: str = "",
    **options: Any,
) -> Check:
    """A check that every node's value is above or below a limit.

    Args:
        check: the id.
        title: what is true of a healthy node.
        read: the value; names the arguments it needs (``answer``, ``node``, ``plan``, ``limits``). None makes the node
            UNKNOWN, and a judgement is final.
        expected: with ``{limit}`` for the threshold.
        fix: what to do about the node.
        least: the name of the limit that the value must reach; WARN below.
        fail_below: the name of the limit below which the node fails.
        most: the name of the limit that the value must not exceed; WARN above. Without either, the limit is 0.
        options: further fields of ``Check``.
    """

    def judge(plan: Plan, node: str, answer: Answer) -> Judgement:
        level = call(read, plan=plan, node=node, answer=answer, limits=plan.limits)
        if level is None:
            return unread(answer)
        if not isinstance(level, Level):
            return Judgement(*level)
        limit = plan.limits[least or most] if least or most else 0.0
        if level.value >= limit if least else level.value <= limit:
            return ok(level.text)
        if level.exempt:
            return ok(f"{level.text}{level.exempt}")
        failed = fail_below and level.value < plan.limits[fail_below]
        return (fail if failed else warn)(
            level.text, expected=level.expected or expected.format(limit=limit), fix=level.fix or fix
        )

    return Check(check, title, judge=judge_of(judge), **options)


def each_node(check: str, title: str, **options: Any) -> Callable[[Callable[..., Judgement | Judgements]], Check]:
    """A check whose function judges one node, or all of them if it names ``answers``.

    The function names the arguments it needs: ``answer`` and ``node``, or ``answers``; ``plan``, ``limits``.

    Args:
        check: the id.
        title: what is true of a healthy node.
        options: further fields of ``Check``. The docstring's text below its first line is ``about``.
    """

    def declare(function: Callable[..., Judgement | Judgements]) -> Check:
        about = (function.__doc__ or "").partition("\n")[2]
        return Check(check, title, judge=judge_of(function), **{"about": about, **options})

    return declare
