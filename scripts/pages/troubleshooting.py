#!/usr/bin/env python3
"""docs/troubleshooting.md, from the table of causes, the rules about runs that train, and the recorded runs.

scripts/pages/troubleshooting.py          writes the page
scripts/pages/troubleshooting.py --print  shows it
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

sys.path[:0] = [str(ROOT)]
sys.path += [str(ROOT / "tests" / "unit")]

from recorded_runs.cases import cases  # noqa: E402

from provision.diagnosis.cause import Cause  # noqa: E402
from provision.diagnosis.causes import SUBJECTS, TABLE  # noqa: E402
from provision.diagnosis.conditions import RULES, Rule  # noqa: E402

HEAD = """\
# Troubleshooting

<!-- scripts/pages/troubleshooting.py writes this page from provision/diagnosis and tests/unit/recorded_runs; a test
compares them. -->

`clusterctl diagnose` reads the logs of all ranks, the events and samples of the nodes' agents and what the kernel said,
and tells which rank failed first and why, or what is wrong with a run that goes on. It needs no node to answer: what
`clusterctl train` has written beside the inventory is read as well. Logs of any other launcher are judged too:

    clusterctl diagnose --log train.log

When a rank fails, all others fail after it: their connections break, they wait for NCCL until a limit, the launcher
tells that a child of it has failed. So a row here is a *cause*; or *unknown*, an exception that no row knows; or
*ended*, when a process or node was ended from outside; or *late*, which explains only where nothing better is seen; or
an *echo*, which never explains. The first sign of the strongest kind is the verdict, and all that follows is folded
below it. What comes within half a second counts as simultaneous. An exception that was survived (the run made steps
after it, or others followed after a minute) is left aside.

The answer names the run, the file and the line of what it quotes, and shows the innermost frames of a Python traceback.
Where an NCCL collective timed out, the verdict is about the rank that did not arrive: the one whose last enqueued
collective is lower in the logs, or whose log says nothing of it. With `--log A B` the times of logs without years are
not compared with other logs: among equal causes the file named first counts, and the answer says so. A node counts as
lost only where nothing of its own says otherwise: a traceback in its agent.log, or an uptime longer than the silence.

{causes} causes and {rules} rules, with {cases} recorded runs
([tests/unit/recorded_runs](../tests/unit/recorded_runs)). *Source* says where the words that are looked for are from.
"""

CONDITIONS = """
## A run that trains, but not well

These are looked for in the progress and the samples of a run that goes on or has finished. A rule is silent when in
doubt; its thresholds are here with the reason for each.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(causes=len(TABLE), rules=len(RULES), cases=len(cases()))]
    for subject, causes in SUBJECTS.items():
        parts.append(f"\n## {subject}\n")
        parts += [cause_section(cause) for cause in causes]
    parts.append(CONDITIONS)
    parts += [rule_section(rule) for rule in RULES]
    return "".join(parts)


def cause_section(cause: Cause) -> str:
    """What the page says about one cause."""
    facts = [f"*{cause.grade}*"] if cause.grade != "cause" else []
    facts += ["survived, it still counts"] if cause.lasting else []
    facts += ["only where nodes differ"] if cause.differs else []
    told = f" ({'; '.join(facts)})" if facts else ""
    source = f"<{cause.source}>" if cause.source.startswith("https://") else cause.source
    return f"\n### {cause.id}\n\n{filled(titled(cause.says) + '.' + told)}\n\n{listed(cause.fix)}\nSource: {source}\n"


def rule_section(rule: Rule) -> str:
    """What the page says about one rule."""
    limits = "".join(
        filled(f"- `{name}` {limit.value:g} {limit.why}", "  ") + "\n" for name, limit in rule.limits.items()
    )
    return f"\n### {rule.id}\n\n{rule.title}.\n\n{listed(rule.fix)}" + (f"\nThresholds:\n\n{limits}" if limits else "")


def listed(fix: tuple[str, ...]) -> str:
    return "".join(filled(f"{number}. {plain(line)}", "   ") + "\n" for number, line in enumerate(fix, 1))


def filled(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def titled(says: str) -> str:
    text = plain(says)
    return text[0].upper() + text[1:]


def plain(template: str) -> str:
    """A sentence with its captured values as words: ``{path}`` becomes ``PATH``; brackets are left out."""
    text = re.sub(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]", r"\1", template)
    return re.sub(r"\{(\w+)\}", lambda found: f"`{found[1].upper()}`", text)


def main() -> None:
    text = page()
    if "--print" in sys.argv[1:]:
        print(text, end="")
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
