"""After ``compare``: the differences of two runs, and what a bisection found."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from provision.inventory.document import printable
from provision.output_text import Summary, duration
from provision.run.difference import KINDS, RANKS, Comparison, outcome
from provision.tasks.bisect import as_data, round_text

if TYPE_CHECKING:
    from provision.tasks.bisect import Bisected
    from provision.tasks.compare import Compared

SHOWN = 12  # differences of a kind
_CONSEQUENCES = 3
WIDTH = 60  # characters of a value
MOST = 2000  # differences in the JSON


def compare_output(good: Compared, bad: Compared, comparison: Comparison) -> Summary:
    """The differences, the most likely cause first, and what could not be compared."""
    data = {
        "good": good.run,
        "bad": bad.run,
        "differences": [
            {"kind": each.kind, "name": each.name, "good": each.values[0], "bad": each.values[1], "why": each.about.why}
            for each in comparison.differences[:MOST]
        ],
        "differences_omitted": max(0, len(comparison.differences) - MOST),
        "unknown": {kind: list(runs) for kind, runs in comparison.unknown.items()},
    }
    lines = [f"GOOD {good.run}: {_outcome(good)}", f"BAD  {bad.run}: {_outcome(bad)}", ""]
    if not comparison.differences:
        lines.append("no difference is known")
    else:
        lines.append("differences, the most likely cause first:")
    for kind, group in groupby(comparison.differences, key=lambda each: each.about):
        found = list(group)
        lines.append(f"{kind.title}: {kind.why}")
        shown = [
            (each.name, *map(_short, each.values)) for each in found[: _CONSEQUENCES if kind.id == "follows" else SHOWN]
        ]
        widths = [max(len(row[at]) for row in shown) for at in (0, 1)]
        lines += [f"  {name.ljust(widths[0])}  {one.ljust(widths[1])} -> {other}" for name, one, other in shown]
        if len(found) > len(shown):
            lines.append(f"  and {len(found) - len(shown):,} more: --json")
    lines += _unknown(good, bad, comparison)
    return data, "\n".join(lines)


def _unknown(good: Compared, bad: Compared, comparison: Comparison) -> list[str]:
    """What could not be compared, by the runs that lack it."""
    names = {good.run: "GOOD", bad.run: "BAD"}
    by_runs: dict[str, list[str]] = {}
    for kind, runs in comparison.unknown.items():
        by_runs.setdefault(" and ".join(names.get(run, run) for run in runs), []).append(KINDS[RANKS[kind]].title)
    why = "the run was started by an older version, or on another machine"
    return (
        [
            "",
            *(
                f"not compared, because the record of {runs} lacks them: {', '.join(kinds)} ({why})"
                for runs, kinds in by_runs.items()
            ),
        ]
        if by_runs
        else []
    )


def _outcome(run: Compared) -> str:
    return printable(", ".join(outcome(run.record))) if run.record else "this machine has no record of it"


def _short(value: str | None) -> str:
    text = "not set" if value is None else printable(" ".join(value.split())) or '""'
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}\N{HORIZONTAL ELLIPSIS}"


def bisect_output(compared: Summary, found: Bisected, commands: Mapping[str, str]) -> Summary:
    """The cause, how sure it is, and the commands to verify it."""
    data, text = compared
    conclusion, settings = found.conclusion, found.space.settings
    total = sum(each.seconds for each in found.rounds)
    lines = [text, "", f"bisection, {len(found.rounds)} rounds in {duration(total)}:"]
    lines += [f"  {number}: {round_text(found.space, each)}" for number, each in enumerate(found.rounds, 1)]
    lines.append("")
    if conclusion.cause:
        lines.append("cause:" if conclusion.sure else "most likely cause, not sure:")
        causes = (settings[at] for at in conclusion.cause)
        lines += [f"  {each.label}: {_short(each.text(bad=False))} -> {_short(each.text(bad=True))}" for each in causes]
    lines.append(conclusion.why)
    lines += [f"not tested: {name}: {why}" for name, why in islice(found.space.untested.items(), SHOWN)]
    lines += [f"to verify, {name}: {command}" for name, command in commands.items()]
    more: dict[str, Any] = {"bisect": as_data(found, commands)}
    return {**data, **more}, "\n".join(lines)
