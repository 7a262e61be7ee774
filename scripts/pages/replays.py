#!/usr/bin/env python3
"""Writes docs/replays.md from the replays of public failures (tests/unit/replay) and what diagnose makes of them."""

from __future__ import annotations

from generated import write
from replay.replays import PARTS, Replay, first_look, replays, score

HEAD = """\
# Replays of public failures

<!-- scripts/pages/replays.py writes this page from tests/unit/replay; a test compares them. -->

{count} failures that users of LLaMA-Factory, DeepSpeed, accelerate, torchrun, NCCL and their neighbours reported in
public threads. Each is a file in [tests/unit/replay/cases](../tests/unit/replay/cases) with what failed and, if the
thread says so, the versions, the number of nodes, and what solved it. Its logs are generated from the libraries' own
message formats ([formats.py](../tests/unit/replay/formats.py)), with the lines that other ranks and the launcher print
afterwards. They are no copies of the threads' logs. This writes the logs of a case into a folder:

    python tests/unit/replay/replays.py nccl-memlock logs

*right* means that `clusterctl diagnose` names the cause that the thread found, or that its log shows. *unknown* means
that it says that it does not know it. *before the start* is the check, the gate's finding or the command that reports
the fault before a run.

A third of the cases, chosen by a hash of their names, is aside: rules were written for the others first, and then the
score of both parts was taken (*first look*). The rules that the part aside showed to be missing followed. The part
*aside2* came later: {second} other threads, taken as a search returned them, written down before their author read a
rule or ran `diagnose`. Rules for it followed its first look, too. Only the first looks of *aside* and *aside2* are
tests on unseen cases, and *aside2* is the harder one. Expect its rate on failures that no case here resembles.

[first_look.yaml](../tests/unit/replay/first_look.yaml) lists the cases that were not right at a first look.
"""


def scores() -> str:
    """The table of scores."""
    rows = ["| part | cases | score | right | wrong | unknown |\n|---|---|---|---|---|---|\n"]
    kept = first_look()
    for part in PARTS:
        cases = [case for case in replays() if case.part == part]
        named = {name: kept[part][name] for name in ("before", "first look") if name in kept[part]}
        for name, found in {**named, "final": score(cases)}.items():
            label = "before these rules" if name == "before" else name
            rows.append(
                f"| {part} | {len(cases)} | {label} | {found['right']} | {found['wrong']} | {found['unknown']} |\n"
            )
    return "".join(rows)


def by_kind() -> str:
    """The table of the kinds of failures."""
    rows = ["| kind | cases | right | wrong | unknown | before the start |\n|---|---|---|---|---|---|\n"]
    for kind, cases in _kinds().items():
        found = score(cases)
        early = sum(bool(case.caught_by) for case in cases)
        rows.append(f"| {kind} | {len(cases)} | {found['right']} | {found['wrong']} | {found['unknown']} | {early} |\n")
    return "".join(rows)


def page() -> str:
    """The whole page."""
    parts = [
        HEAD.format(count=len(replays()), second=sum(case.part == "aside2" for case in replays())),
        "\n",
        scores(),
        "\n",
        by_kind(),
    ]
    for kind, cases in _kinds().items():
        parts.append(f"\n## {kind[0].upper()}{kind[1:]}\n\n")
        parts.append("| case | program | cause | before the start | verdict |\n|---|---|---|---|---|\n")
        for case in cases:
            cause = f"[{case.cause}]" if case.verdict == "right" else "not named"
            aside = "" if case.part == "rules" else f" ({case.part})"
            parts.append(
                f"| [{case.id}]{aside} | {case.program} | {cause} | {_early(case.caught_by)} | {case.verdict} |\n"
            )
    parts.append("\n")
    parts += [f'[{case.id}]: {case.source} "{case.title}"\n' for case in replays()]
    causes = sorted({case.cause for case in replays() if case.verdict == "right"})
    parts += [f"[{cause}]: troubleshooting.md#{cause.replace('.', '')}\n" for cause in causes]
    return "".join(parts)


def _kinds() -> dict[str, list[Replay]]:
    found: dict[str, list[Replay]] = {}
    for case in sorted(replays(), key=lambda case: (case.kind, case.id)):
        found.setdefault(case.kind, []).append(case)
    return found


def _early(caught_by: str) -> str:
    if not caught_by:
        return "-"
    return f"`clusterctl {caught_by}`" if "." not in caught_by else f"`{caught_by}`"


if __name__ == "__main__":
    write({"docs/replays.md": page()})
