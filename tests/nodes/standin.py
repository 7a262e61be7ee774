"""A replacement of nvidia-smi on nodes without GPUs: it prints recorded answers of a real one on two H200."""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))  # for recorded; last, so that it hides no module

from recorded import recorded

from provision import checks
from provision.checks.kit.gpu import FIELDS, GPUS, SMI
from provision.render import quote

PLACE = "usr/local/bin/nvidia-smi"
_CALL = re.compile(rf"\b{SMI} ([a-z-][^\n)|]*)")  # the query of a probe; the first call of several
_ADDED = re.compile(r"^(asked|model .*)\n", re.MULTILINE)  # lines that a probe adds to what nvidia-smi prints


def nvidia_smi(*, changed=(), also=()):
    """The program's text.

    Args:
        changed: (field, value): what the query for all GPUs answers otherwise, for the last GPU or, since it is the
            node's, for all.
        also: (check, faulty recording's number): checks whose own query answers as on the first node with a fault.
    """
    answers = {}
    for check in checks.ids():
        if check.startswith("gpu.") and checks.load(check).tool == SMI:
            healthy, faulty = recorded(check).healthy[0], dict(also).get(check)
            call = _CALL.search(checks.load(check).probe)
            if not healthy.seen or call is None:
                continue
            answer = next(iter(healthy.answers.values()))
            if faulty is not None:
                fault = recorded(check).faulty[faulty]
                answer = fault.answers[next(iter(fault.finds))]
            if checks.load(check).probe == GPUS:
                answer = answers.get(call[1], answer)
            answers[call[1]] = answer
    asked = _CALL.search(GPUS)[1]
    text = answers[asked].out
    rows = [line.split(", ") for line in text.splitlines()]
    for field, value in changed:
        for row in rows if field == "driver_version" else rows[-1:]:
            row[FIELDS.index(field)] = value
    cases = "".join(
        f"{quote(call)}) printf %s {quote(_printed(rows, answer.out, same=call == asked))}; exit {answer.rc} ;;\n"
        for call, answer in answers.items()
    )
    return f'#!/bin/sh\ncase "$*" in\n{cases}*) echo "the recording has no answer to $*"; exit 2 ;;\nesac\n'


def _printed(rows, out, *, same):
    return "\n".join(", ".join(row) for row in rows) + "\n" if same else _ADDED.sub("", out).lstrip("\n")


def install(box, node, text):
    """Make ``text`` a node's nvidia-smi."""
    path = box.node_root(node) / PLACE
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
