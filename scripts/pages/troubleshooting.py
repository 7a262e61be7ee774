#!/usr/bin/env python3
"""Writes docs/troubleshooting.md from the table of causes, the rules about running trainings, and the recorded runs."""

from __future__ import annotations

import re
import textwrap

from generated import write
from recorded_runs.cases import cases
from replays import by_kind, scores

from provision.diagnosis.cause import Cause
from provision.diagnosis.causes import SUBJECTS, TABLE
from provision.diagnosis.conditions import RULES, Rule

HEAD = """\
# Troubleshooting

<!-- scripts/pages/troubleshooting.py writes this page from provision/diagnosis and tests/unit/recorded_runs; a test
compares them. -->

`clusterctl diagnose` reads the logs of all ranks, the events and samples of the agents, and the kernel's messages. It
reports which rank failed first and why, or what is wrong with a run that is still running. It works without a node: it
also reads the record that `clusterctl train` wrote beside the inventory. It reads logs of other launchers, too:

    clusterctl diagnose --log train.log

When a rank fails, all others fail after it: their connections break, NCCL times out, and the launcher reports a failed
child. The first sign of the strongest kind is the verdict, and the signs after it are folded below it. The kinds, the
strongest first:

- *cause*: a row of this page
- *unknown*: an exception that matches no row
- *ended*: something outside the run killed a process or a node
- *late*: explains a failure only if there is no better sign
- *echo*: never explains a failure

Signs within half a second count as simultaneous. An exception that the run survived is ignored: the run made steps
after it, or other signs followed more than a minute later.

The answer names the run, the file and the line of each quotation, and shows the innermost frames of a Python
traceback. After a time-out of an NCCL collective the verdict names the rank that did not arrive. This is the rank
whose last enqueued collective is lower in the logs, or whose log does not mention it. With `--log A B`, times in logs
without years are not compared with other logs: among equal causes the first file counts, and the answer says so. A
node counts as lost only if neither a traceback in its agent.log nor an uptime longer than the silence says otherwise.

{causes} causes and {rules} rules, with {cases} recorded runs
([tests/unit/recorded_runs](../tests/unit/recorded_runs)). *Source* is the origin of the text that a row matches.
"""

REPLAYS = """
## How often it is right

[Replays of public failures](replays.md) are failures that users reported in public threads, rebuilt from the libraries'
message formats. The parts *aside* and *aside2* were kept aside while rules were written. Only their first looks are
tests on unseen cases. The threads of *aside2* were taken as a search returned them:

"""

CONDITIONS = """
## A run that trains, but not well

`clusterctl diagnose` looks for these in the progress and the samples of a run that is running or has finished. A rule
is silent when in doubt. Each threshold has its reason.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(causes=len(TABLE), rules=len(RULES), cases=len(cases()))]
    for subject, causes in SUBJECTS.items():
        parts.append(f"\n## {subject}\n")
        parts += [cause_section(cause) for cause in causes]
    parts += [REPLAYS, scores(), "\n", by_kind(), CONDITIONS]
    parts += [rule_section(rule) for rule in RULES]
    return "".join(parts)


def cause_section(cause: Cause) -> str:
    """The section about one cause."""
    facts = [f"*{cause.grade}*"] if cause.grade != "cause" else []
    facts += ["survived, it still counts"] if cause.lasting else []
    facts += ["only where nodes differ"] if cause.differs else []
    notes = f" ({'; '.join(facts)})" if facts else ""
    source = f"<{cause.source}>" if cause.source.startswith("https://") else cause.source
    return f"\n### {cause.id}\n\n{filled(titled(cause.says) + '.' + notes)}\n\n{listed(cause.fix)}\nSource: {source}\n"


def rule_section(rule: Rule) -> str:
    """The section about one rule."""
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
    """A sentence with its captured values as words: ``{path}`` becomes ``PATH``; brackets are dropped."""
    text = re.sub(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]", r"\1", template)
    return re.sub(r"\{(\w+)\}", lambda found: f"`{found[1].upper()}`", text)


if __name__ == "__main__":
    write({"docs/troubleshooting.md": page()})
