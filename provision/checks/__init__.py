"""Preflight checks, one file each: adding ``provision/checks/<id>.py`` adds a check; dots of the id become underscores.

A check looks at nodes with a read-only sh ``PROBE`` and judges all answers together, since what matters is often that
nodes differ. Its file holds:

``LEVEL``
    0: passive and quick, part of every check; 1: between pairs of nodes.
``TITLE``
    what is so on a healthy node, a few words that begin with a small letter.
``PROBE``
    sh that prints what ``judge`` reads: text, or a function ``probe(seen: Plan, node: Node) -> str`` where it depends
    on the inventory or the node. It runs as the training user with the locale C, no input, and ``TIMEOUT`` seconds.
    It always prints something, also where nothing was found: an empty answer is one that went wrong. At most 64 KiB.
``TIMEOUT`` (optional)
    seconds after which the probe is given up; 10 when left out.
``TOOL`` (optional)
    a program whose absence makes the check UNKNOWN on that node, before the probe is run; where it hung once, no other
    probe of that tool is begun.
``ROOT`` (optional)
    True: the probe needs root's rights; without them it still runs and its answer says so.
``BUNDLE`` (optional)
    True: the check compares nodes with a bundle, and is left out when none is given.
``LIMITS`` (optional)
    thresholds by name, each a number with its unit in the name (``skew_ms``); the inventory's ``checks:`` overrides
    them. ``seen.limits`` holds those of the check that is judging, and no others.
``WHY``
    one or two sentences: what happens to a training when this is wrong.
``judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]``
    one Finding for each node of ``answers``, made by ``ok``, ``warn``, ``fail`` and ``unknown``. A node that did not
    answer is not among them: the caller names it.

``HUNG`` and ``HUNG_FIX`` (optional)
    the verdict where no answer came in time, UNKNOWN when left out, and what to do then.

Checks whose ``PROBE`` and ``TOOL`` are equal share one run of it: a query that answers several checks is asked once.
Probes of one ``TOOL`` run one after the other, as do those without one whose ids begin with the same word; all others
run beside them. A probe is a piece of a larger script, in a subshell of its own: it may set variables, ``cd`` and
``exit``. To start a program costs a millisecond, and a node has a hundred checks: read files with ``read`` and
``while read``, not with ``cat``, where that is no longer. PATH ends with the folders of system programs.

Where a node lacks the ``TOOL`` and the hardware that the first word of the id stands for (``gpu``, ``ib``), it is OK,
or ``ABSENT`` (optional, with ``ABSENT_FIX``) where other nodes have it: for the one check that counts.

A measure (``MEASURE = "ports" | "clock" | "shares"`` in place of ``PROBE``) needs several nodes at once;
``tasks/measures`` takes it, and ``judge`` reads its lines from the answers' ``out`` as any other's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from provision.model import Finding, Inventory, Node, Verdict

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest

State = Literal["answered", "missing", "absent", "hung"]
_DIGITS = 100  # of a number: no machine has a longer one, ``int`` refuses 4,301, and a float holds 308
_ENDLESS = re.compile(rf"\d{{{_DIGITS + 1}}}")


@dataclass(frozen=True)
class Plan:
    """What is asked of a check: the cluster, the nodes that are meant, and what shall run on them.

    Attributes:
        inventory: the cluster.
        nodes: those of its nodes that are checked; the first is rank 0.
        manifest: of the bundle that is to run there; None when none was given.
        limits: the check's thresholds, the inventory's own values put over its ``LIMITS``.
        user: the training user's login name on the nodes, "" where it is each node's own.
    """

    inventory: Inventory
    nodes: tuple[Node, ...]
    manifest: Manifest | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    user: str = ""


@dataclass(frozen=True)
class Answer:
    """What a probe brought back from one node.

    Attributes:
        out: its standard output.
        rc: its exit status.
        state: ``missing``: the node lacks the check's ``TOOL``; ``absent``: and the hardware it is for as well;
            ``hung``: given up after its ``TIMEOUT``.
        root: whether it ran with root's rights.
        err: what it said on standard error, at most a few lines.
    """

    out: str = ""
    rc: int = 0
    state: State = "answered"
    root: bool = False
    err: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of ``out`` without those that are empty."""
        return tuple(line.strip() for line in self.out.splitlines() if line.strip())


@cache
def ids() -> tuple[str, ...]:
    """Every check's id, sorted. Files whose name begins with ``_`` hold what checks share."""
    names = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(sorted(name.replace("_", ".", 1) for name in names if not name.startswith("_")))


@cache
def load(check: str) -> ModuleType:
    """The module of a check; its id is known to exist."""
    return import_module(f"provision.checks.{check.replace('.', '_')}")


def judged(check: str, seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """What a check says about every answer: UNKNOWN where its tool is missing or hung, else as it judges."""
    module = load(check)
    tool = getattr(module, "TOOL", "")
    good = {}
    absent = {name for name, answer in answers.items() if answer.state == "absent"}
    for name, answer in answers.items():
        if answer.state == "missing":
            yield unknown(check, name, f"{tool} is not installed", fix=f"install {tool}")
        elif answer.state == "absent":
            said = f"no {HARDWARE[check.partition('.')[0]]}, no {tool}"
            verdict: Verdict = getattr(module, "ABSENT", "N/A")
            if verdict == "N/A" or len(absent) == len(answers):
                yield not_here(check, name, said)
                continue
            others = f"{said}; {len(answers) - len(absent)} of the other {len(answers) - 1} nodes have it"
            yield Finding(check, name, verdict, others, module.TITLE, module.WHY, getattr(module, "ABSENT_FIX", ""))
        elif answer.state == "hung":
            seconds = getattr(module, "TIMEOUT", TIMEOUT)
            hung: Verdict = getattr(module, "HUNG", "UNKNOWN")  # where not to answer is itself the fault, FAIL
            said = f"no answer from {tool or 'the probe'} within {seconds:g} s"
            yield Finding(check, name, hung, said, module.TITLE, module.WHY, getattr(module, "HUNG_FIX", ""))
        elif _ENDLESS.search(answer.out):
            yield unknown(check, name, f"its answer has a number of more than {_DIGITS} digits")
        else:
            good[name] = answer
    if good:
        yield from module.judge(seen, good)


TIMEOUT = 10.0  # seconds for a probe that names no other
HARDWARE = {"gpu": "NVIDIA GPU", "ib": "InfiniBand"}  # what a check is about that a node need not have


def ok(check: str, node: str, observed: str) -> Finding:
    """It is as it should be."""
    return Finding(check, node, "OK", observed)


def not_here(check: str, node: str, observed: str) -> Finding:
    """The node does not have what the check is about: nothing was checked."""
    return Finding(check, node, "N/A", observed)


def warn(check: str, node: str, observed: str, *, expected: str, fix: str) -> Finding:
    """It will run, slower or at a risk."""
    return _found(check, node, "WARN", observed, expected, fix)


def fail(check: str, node: str, observed: str, *, expected: str, fix: str) -> Finding:
    """A training would hang, crash or go wrong."""
    return _found(check, node, "FAIL", observed, expected, fix)


def unknown(check: str, node: str, observed: str, *, expected: str = "", fix: str = "") -> Finding:
    """Nothing is known: a tool is missing, rights are, or its output is not understood."""
    return _found(check, node, "UNKNOWN", observed, expected, fix)


def _found(check: str, node: str, verdict: Verdict, observed: str, expected: str, fix: str) -> Finding:
    module = load(check)
    return Finding(check, node, verdict, observed, expected or module.TITLE, module.WHY, fix)
