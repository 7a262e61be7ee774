"""After ``check``: the findings, the worst first, with equal nodes folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from provision.checks import load
from provision.env.text import number
from provision.inventory import fold
from provision.output_text import Line, Style, Summary, clean, fold_equal

if TYPE_CHECKING:
    from provision.model import Finding
    from provision.tasks.check import CheckResult

_WORST_FIRST: Mapping[str, Style] = {"FAIL": "red", "WARN": "yellow", "UNKNOWN": "yellow", "OK": "green", "N/A": "dim"}


def check_output(result: CheckResult) -> Summary:
    """The numbers; ``finding_rows`` has the words."""
    counts = {verdict: len(result.having(verdict)) for verdict in _WORST_FIRST}
    data: dict[str, Any] = {
        "nodes": list(result.nodes),
        "unreachable": dict(result.unreachable),
        "checks": list(result.checks),
        "counts": counts,
        "findings": [vars(finding) for finding in result.findings],
        "seconds": round(result.seconds, 2),
    }
    if not result.nodes:
        return data, ""
    parts = [
        f"{counts[verdict]} {verdict} ({number(len({finding.check for finding in result.having(verdict)}), 'check')})"
        for verdict in ("FAIL", "WARN", "UNKNOWN")
        if counts[verdict]
    ]
    lacking = result.having("N/A")
    if lacking:
        parts.append(f"{counts['OK']} OK, {counts['N/A']} n/a ({_reasons(lacking)})")
    elif parts:
        parts.append(f"{counts['OK']} OK")
    summary = f"{fold(result.nodes)}: {number(len(result.checks), 'check')} in {result.seconds:.1f} s, "
    return data, summary + (", ".join(parts) or "all OK")


def _reasons(findings: Iterable[Finding]) -> str:
    """Why checks did not apply, the most frequent reason first: ``no NVIDIA GPU, no InfiniBand``."""
    counted = Counter(finding.observed.partition(",")[0] for finding in findings)
    return ", ".join(text for text, _ in counted.most_common(2))


def finding_rows(result: CheckResult, *, verbose: bool = False) -> list[Line]:
    """Every check with a problem; with ``verbose``, also the checks that are OK or do not apply."""
    rows: list[Line] = []
    for verdict in ("FAIL", "WARN", "UNKNOWN"):
        by_check: dict[str, list[Finding]] = {}
        for finding in result.having(verdict):
            by_check.setdefault(finding.check, []).append(finding)
        for heads, findings in _alike(by_check):
            rows += _block(verdict, heads, findings)
    if verbose:
        for check in result.checks:
            for verdict, word in (("OK", "OK"), ("N/A", "n/a")):
                good = {each.node: each.observed for each in result.having(verdict) if each.check == check}
                rows += [
                    Line(f"{word}  {check}  {names}: {clean(observed)}", "dim")
                    for observed, names in fold_equal(good).items()
                ]
    return rows


def _alike(by_check: Mapping[str, list[Finding]]) -> Iterator[tuple[list[str], list[Finding]]]:
    """Groups checks with equal findings: one missing tool can affect twenty checks."""
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for check, findings in by_check.items():
        key = tuple((finding.node, finding.observed, finding.fix) for finding in findings)
        groups.setdefault(key, []).append(check)
    for checks in groups.values():
        yield checks, by_check[checks[0]]


def _block(verdict: str, checks: list[str], findings: list[Finding]) -> list[Line]:
    """One check: observed and expected values, the reason, and the fix."""
    title = f": {load(checks[0]).title}" if len(checks) == 1 else ""
    rows = [Line(f"{verdict}  {', '.join(checks)}{title}", _WORST_FIRST[verdict], hang=len(verdict) + 2)]
    observed = fold_equal({finding.node: finding.observed for finding in findings})
    rows += [Line(f"    {names}: {clean(text)}") for text, names in observed.items()]
    if len(checks) == 1:
        expected = _different(finding.expected for finding in findings)
        rows += [Line(f"    expected: {clean(each)}") for each in expected if each != load(checks[0]).title]
        rows += [Line(f"    why: {clean(each)}") for each in _different(finding.why for finding in findings)]
    fixes = fold_equal({finding.node: finding.fix for finding in findings if finding.fix})
    for fix, names in fixes.items():
        where = f" ({names})" if len(fixes) > 1 else ""
        rows.append(Line(f"    try: {clean(fix)}{where}", "bold", hang=None))
    return rows


def _different(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]
