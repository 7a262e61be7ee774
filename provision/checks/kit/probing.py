"""The probes of all checks as one sh script for a node, and its output back to answers. Pure.

The script prints frames: ``@clusterctl:TOKEN:KIND:INDEX:WORD:`` on a separate line, after a line break that is
not part of the text before it. ``out`` and ``err`` are followed by a probe's outputs; ``state`` has its exit status,
or ``missing``, ``absent`` or ``hung`` (a probe without one was not finished in time); ``root`` has the user id, and
``end`` comes last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from provision.checks import HARDWARE, Answer, Plan, State, load
from provision.errors import ClusterctlError
from provision.model import Node
from provision.render import render
from provision.script import printable

LONGEST = 65536  # characters of an answer that are kept
_ERR_LONGEST = 1000
_TOKEN = re.compile(r"[0-9A-Za-z]+")


@dataclass(frozen=True)
class Probe:
    """What is run on a node for one check.

    Attributes:
        check: the id.
        text: sh.
        timeout: whole seconds.
        tool: the program that it asks, "" for none in particular.
    """

    check: str
    text: str
    timeout: int
    tool: str = ""

    @property
    def kind(self) -> str:
        """The first word of the id."""
        return self.check.partition(".")[0]

    @property
    def group(self) -> tuple[str, str]:
        """Probes with the same one run one after the other."""
        return (self.tool, "" if self.tool else self.kind)


@dataclass(frozen=True)
class Script:
    """One script, and which of its probes answers which check."""

    text: str
    token: str
    indices: Mapping[str, int]


def probe_of(check: str, plan: Plan, node: Node) -> Probe:
    """The probe of a check for one node."""
    found = load(check)
    return Probe(check, found.probe_for(plan, node), math.ceil(found.timeout), found.tool)


def compile_probes(probes: Sequence[Probe], *, token: str, limit: int) -> Script:
    """One script that runs all probes, equal ones once.

    Args:
        probes: of one node, at most one for a check.
        token: letters and digits that no command's output can guess; new for every run.
        limit: seconds after which the script reports what it has.
    """
    if not _TOKEN.fullmatch(token):
        raise ClusterctlError(f"{token!r} is no token: letters and digits only")
    indices: dict[str, int] = {}
    numbers: dict[tuple[str, str], int] = {}
    once: dict[int, Probe] = {}
    for probe in probes:
        number = indices[probe.check] = numbers.setdefault((probe.tool, probe.text), len(numbers))
        first = once.setdefault(number, probe)
        if probe.timeout > first.timeout:
            once[number] = replace(first, timeout=probe.timeout)
    groups: dict[tuple[str, str], dict[int, Probe]] = {}
    for number, probe in once.items():
        groups.setdefault(probe.group, {})[number] = probe
    values = [
        {
            "tool": tool,
            "hardware": _hardware(group.values()),
            "indices": sorted(group),
            "probes": [
                {"index": number, "timeout": probe.timeout, "text": probe.text} for number, probe in group.items()
            ],
        }
        for (tool, _), group in groups.items()
    ]
    text = render(
        "check/probes.sh.j2", token=token, limit=max(1, limit), groups=values, numbers=list(range(len(values)))
    )
    return Script(text, token, indices)


def _hardware(probes: Iterable[Probe]) -> str:
    """What a node must have for these to make sense; "" where they do not agree."""
    kinds = {probe.kind for probe in probes}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(HARDWARE) else ""


def parse(script: Script, out: str) -> dict[str, Answer]:
    """The answer of every check whose probe the script holds."""
    # The line break behind a frame may be the one before the next: bash writes each line on its own, and so may others
    # write between two lines of a runner.
    frame = re.compile(rf"\n@clusterctl:{re.escape(script.token)}:([a-z]+):([0-9]{{0,9}}):([a-z0-9]{{0,20}}):(?=\n)")
    texts: dict[tuple[str, int], str] = {}
    states: dict[int, str] = {}
    root = False
    _, *pieces = frame.split("\n" + out)
    for kind, index, word, text in zip(*(iter(pieces),) * 4, strict=True):
        if kind in ("out", "err"):
            texts[kind, int(index)] = printable(text[1:])
        elif kind == "state":
            states[int(index)] = word
        elif kind == "root":
            root = word == "0"
    answers = {number: _answer(number, texts, states, root=root) for number in set(script.indices.values())}
    return {check: answers[number] for check, number in script.indices.items()}


def _answer(number: int, texts: Mapping[tuple[str, int], str], states: Mapping[int, str], *, root: bool) -> Answer:
    out = texts.get(("out", number), "")[:LONGEST]
    err = texts.get(("err", number), "").strip()[:_ERR_LONGEST]
    state = states.get(number, "hung")
    if state.isdecimal():
        return Answer(out, int(state), root=root, err=err)
    return Answer(out, 1, cast("State", state), root, err)
