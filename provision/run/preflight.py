"""The gate's results in the record of a run: how many checks passed, and what the others found. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from provision.masking import mask_text
from provision.model import Finding
from trainer.agent.contract.untrusted import is_whole

_ORDER = ("FAIL", "WARN", "UNKNOWN", "OK", "N/A")  # the worst first
_PROBLEMS = _ORDER[:3]
_MOST = 100  # problems in a record
_NODES = 1000  # names of a problem
_LONG = 500  # characters of a text


@dataclass(frozen=True)
class Problem:
    """A finding about one or several nodes; ``verdict`` is ``FAIL`` (of a forced start), ``WARN`` or ``UNKNOWN``."""

    check: str
    verdict: str
    nodes: tuple[str, ...]
    observed: str
    fix: str = ""


@dataclass(frozen=True)
class Preflight:
    """The gate's results.

    Attributes:
        checks: by verdict, the number of checks that have it on their worst node.
        problems: the worst first.
        dropped: the nodes that were left out, each with its reason.
    """

    checks: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)


def preflight(findings: Iterable[Finding], dropped: Mapping[str, str]) -> Preflight:
    """The gate's results from its findings: equal ones of several nodes are one problem."""
    worst: dict[str, str] = {}
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for each in findings:
        worst[each.check] = min(worst.get(each.check, each.verdict), each.verdict, key=_ORDER.index)
        if each.verdict in _PROBLEMS:
            key = (each.verdict, each.check, mask_text(each.observed)[:_LONG], mask_text(each.fix)[:_LONG])
            alike.setdefault(key, []).append(each.node)
    problems = (
        Problem(check, verdict, tuple(nodes[:_NODES]), observed, fix)
        for (verdict, check, observed, fix), nodes in sorted(alike.items(), key=lambda each: _ORDER.index(each[0][0]))
    )
    reasons = {name: mask_text(why)[:_LONG] for name, why in islice(dropped.items(), _NODES)}
    return Preflight(dict(Counter(worst.values())), tuple(islice(problems, _MOST)), reasons)


def to_record(done: Preflight) -> dict[str, Any]:
    """The results for the record."""
    problems = [{**vars(each), "nodes": list(each.nodes)} for each in done.problems]
    return {"checks": dict(done.checks), "problems": problems, "dropped": dict(done.dropped)}


def from_record(content: object) -> Preflight | None:
    """The results in a record; None if it has none, as records of older versions. Skips what it does not know."""
    if not isinstance(content, dict):
        return None
    checks, problems, dropped = (content.get(name) for name in ("checks", "problems", "dropped"))
    counts = {name: checks[name] for name in _ORDER if _count(checks.get(name))} if isinstance(checks, dict) else {}
    read = [_problem(each) for each in problems[:_MOST]] if isinstance(problems, list) else []
    reasons = dict(islice(dropped.items(), _NODES)) if isinstance(dropped, dict) else {}
    return Preflight(
        counts, tuple(each for each in read if each), {str(name): str(why)[:_LONG] for name, why in reasons.items()}
    )


def _count(value: object) -> bool:
    return is_whole(value, 1_000_000, 1)


def _problem(content: object) -> Problem | None:
    if not isinstance(content, dict) or content.get("verdict") not in _PROBLEMS:
        return None
    nodes = content.get("nodes")
    names = tuple(str(name)[:_LONG] for name in nodes[:_NODES]) if isinstance(nodes, list) else ()
    check, observed, fix = (str(content.get(name) or "")[:_LONG] for name in ("check", "observed", "fix"))
    return Problem(check, content["verdict"], names, observed, fix)
