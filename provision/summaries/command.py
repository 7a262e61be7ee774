"""After ``run``: the output of the nodes, equal outputs once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.inventory import fold
from provision.output_text import Line, clean
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.model import Result
    from provision.tasks.command import Commanded

_RULE = "-" * 15


def ran(result: Commanded) -> Summary:
    """After ``run``, for ``--json``; people get ``ran_rows``."""
    nodes: dict[str, dict[str, object]] = {
        name: {"rc": answer.rc, "out": answer.out, "err": answer.err, "seconds": round(answer.seconds, 3)}
        for name, answer in result.results.items()
    }
    nodes |= {
        name: {"rc": None, "out": "", "err": "", "reason": why}
        for name, why in result.failed.items()
        if name not in nodes
    }
    return {"command": result.command, "nodes": nodes}, ""


def ran_rows(result: Commanded) -> list[Line]:
    """One block for each different answer, that of most nodes first; under the names what they said, as it came.

    stderr follows stdout. Exit codes are in the error, not here.
    """
    said = {name: _text(answer) for name, answer in result.results.items()}
    rows: list[Line] = []
    for text, names in _groups(said):
        if text:
            count = f" ({len(names)})" if len(names) > 1 else ""
            rows += [Line(_RULE, "dim"), Line(f"{fold(names)}{count}", "bold"), Line(_RULE, "dim")]
            rows += [Line(row, hang=None) for row in text.split("\n")]
    if not rows and said and not result.failed:
        rows.append(Line(f"{fold(said)}: done, no output"))
    return rows


def _text(answer: Result) -> str:
    parts = (clean(part).rstrip("\n") for part in (answer.out, answer.err))
    return "\n".join(part for part in parts if part)


def _groups(said: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, text in said.items():
        groups.setdefault(text, []).append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))
