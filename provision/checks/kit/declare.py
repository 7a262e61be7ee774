"""Checks as declarations: equal on all nodes, above or below a threshold, or a function that judges one node."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

from provision.checks import Answer, Answers, Check, Judgement, Judgements, Plan, call, fail, judge_of, ok, warn
from provision.checks.kit.compare import odd
from provision.checks.kit.host import read_all, unread
from provision.model import Verdict

T = TypeVar("T", bound=Hashable)


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

    def judge(seen: Plan, answers: Answers) -> Judgements:
        values = yield from read_all(answers, read)
        level = verdict(seen) if callable(verdict) else verdict
        compared = near(values, seen.limits) if near else values
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
        read: the value; names the arguments it needs (``answer``, ``node``, ``seen``, ``limits``). None makes the node
            UNKNOWN, and a judgement is final.
        expected: with ``{limit}`` for the threshold.
        fix: what to do about the node.
        least: the name of the limit that the value must reach; WARN below.
        fail_below: the name of the limit below which the node fails.
        most: the name of the limit that the value must not exceed; WARN above. Without either, the limit is 0.
        options: further fields of ``Check``.
    """

    def judge(seen: Plan, node: str, answer: Answer) -> Judgement:
        level = call(read, seen=seen, node=node, answer=answer, limits=seen.limits)
        if level is None:
            return unread(answer)
        if not isinstance(level, Level):
            return Judgement(*level)
        limit = seen.limits[least or most] if least or most else 0.0
        if level.value >= limit if least else level.value <= limit:
            return ok(level.text)
        if level.exempt:
            return ok(f"{level.text}{level.exempt}")
        failed = fail_below and level.value < seen.limits[fail_below]
        return (fail if failed else warn)(
            level.text, expected=level.expected or expected.format(limit=limit), fix=level.fix or fix
        )

    return Check(check, title, judge=judge_of(judge), **options)


def each_node(check: str, title: str, **options: Any) -> Callable[[Callable[..., Judgement | Judgements]], Check]:
    """A check whose function judges one node, or all of them if it names ``answers``.

    The function names the arguments it needs: ``answer`` and ``node``, or ``answers``; ``seen``, ``limits``.

    Args:
        check: the id.
        title: what is true of a healthy node.
        options: further fields of ``Check``. The docstring's text below its first line is ``about``.
    """

    def declare(function: Callable[..., Judgement | Judgements]) -> Check:
        about = (function.__doc__ or "").partition("\n")[2]
        return Check(check, title, judge=judge_of(function), **{"about": about, **options})

    return declare
