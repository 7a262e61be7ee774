"""Checks a DeepSpeed configuration before the start: the file alone, and together with the training's arguments.

::

    findings = check(text, Context(program="trainer", arguments=parse(["--learning_rate", "2e-5"]), world=8))

It needs only the standard library.
"""

from __future__ import annotations

from typing import List

from trainer.ds_config.check.arguments import check_arguments, matching, parse
from trainer.ds_config.check.context import ACCELERATE, OWN, TRAINER, UNKNOWN, Context
from trainer.ds_config.check.finding import ERROR, WARNING, Finding, fails, in_order
from trainer.ds_config.check.keys import check_keys, table
from trainer.ds_config.check.reading import LIMIT, read
from trainer.ds_config.check.rules import check_rules

__all__ = [
    "ACCELERATE",
    "ERROR",
    "LIMIT",
    "OWN",
    "TRAINER",
    "UNKNOWN",
    "WARNING",
    "Context",
    "Finding",
    "check",
    "fails",
    "matching",
    "parse",
    "table",
]


def check(text: str, context: Context) -> List[Finding]:
    """Return every finding about a file, in the order of its lines.

    Args:
        text: the content of the file.
        context: what is known about the training.
    """
    document = read(text, hjson=context.hjson)
    trainer = context.program != OWN
    return in_order(
        [
            *document.findings,
            *check_keys(document, trainer=trainer),
            *check_rules(document, context),
            *check_arguments(document, context),
        ]
    )
