"""Preflight checks. A check runs a read-only sh probe on every node and judges the answers.

A check is either a declaration in a subject file (``cpu.py``: ``equal(...)``, ``threshold(...)`` or
``@each_node(...)``) or a separate module, ``<subject>_<name>.py``, whose id is ``<subject>.<name>``. The file is the
registration. A module has the constants below; a declaration takes the same words in lower case.

``TITLE``
    What is true of a healthy node: a few words that begin with a small letter.
``WHY``
    One or two sentences: what happens to a training when this is wrong.
``PROBE`` or ``probe(plan, node)``
    sh that prints what ``judge`` reads; a function where it depends on the inventory or the node. It runs as the
    training user with the locale C and no input. It always prints something: an empty answer means that the probe
    failed. Answers are cut at 64 KiB.
``judge``
    Names the arguments it needs. With ``answer`` (and ``node``, ``plan``, ``limits``) it judges one node and returns a
    Judgement: ``ok``, ``warn``, ``fail``, ``unknown`` or ``not_here``. With ``answers`` (and ``plan``, ``limits``) it
    sees all nodes that answered and yields ``node, judgement`` for each.

Optional:

``LEVEL``
    0 (default): passive and quick, part of every check; 1: between pairs of nodes.
``TIMEOUT``
    Seconds after which the probe is stopped; 10 by default.
``TOOL``
    A program without which the check is UNKNOWN on a node. Once a tool has hung, no further probe of it starts.
``ROOT``
    True: the probe needs root's rights for a complete answer.
``BUNDLE``
    True: the check compares nodes with a bundle and is skipped without one.
``LIMITS``
    Thresholds by name, each a number with its unit in the name (``skew_ms``). The inventory's ``checks:`` overrides
    them.
``HUNG``, ``HUNG_FIX``
    The verdict if no answer came in time (UNKNOWN by default), and the fix.
``ABSENT``, ``ABSENT_FIX``
    The verdict if the node lacks the hardware of the check's subject (``gpu``, ``ib``) but other nodes have it.
``MEASURE``
    ``ports``, ``clock`` or ``shares`` in place of ``PROBE``: ``tasks/measures`` takes it, with several nodes at once.

Checks with the same ``PROBE`` and ``TOOL`` share one run of it. Probes of one ``TOOL`` run one after the other, as do
those without one whose ids begin with the same word; all others run in parallel. A probe runs in its own subshell: it
may set variables, ``cd`` and ``exit``. Starting a program costs a millisecond: read short files with ``read``, not
``cat``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from provision.errors import ClusterctlError, UsageError
from provision.model import CheckOptions, Finding, Inventory, Node, Verdict

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest

State = Literal["answered", "missing", "absent", "hung"]
HARDWARE = {"gpu": "NVIDIA GPU", "ib": "InfiniBand"}  # subjects whose hardware a node may lack
_DIGITS = 100  # no machine reports a longer number; ``int`` refuses 4,301 digits, a float holds 308
_ENDLESS = re.compile(rf"\d{{{_DIGITS + 1}}}")


@dataclass(frozen=True)
class Plan:
    """The cluster, the nodes to check, and the bundle that will run on them.

    Attributes:
        inventory: the cluster.
        nodes: the nodes to check; the first is rank 0.
        manifest: of the bundle; None without one.
        limits: the check's thresholds: its own ``LIMITS``, overridden by the inventory.
        user: the training user's login name on the nodes, "" for each node's own.
    """

    inventory: Inventory
    nodes: tuple[Node, ...]
    manifest: Manifest | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    user: str = ""


@dataclass(frozen=True)
class Answer:
    """The output of a probe on one node.

    Attributes:
        out: its standard output.
        rc: its exit status.
        state: ``missing``: the node lacks the check's ``TOOL``; ``absent``: it lacks the hardware as well; ``hung``:
            the probe was stopped after its ``TIMEOUT``.
        root: whether it ran with root's rights.
        err: the first lines of its standard error.
    """

    out: str = ""
    rc: int = 0
    state: State = "answered"
    root: bool = False
    err: str = ""

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines of ``out`` that are not empty."""
        return tuple(line.strip() for line in self.out.splitlines() if line.strip())


class Judgement(NamedTuple):
    """What a check says about one node. ``expected`` is the check's title if empty."""

    verdict: Verdict
    observed: str
    expected: str = ""
    fix: str = ""


Answers = Mapping[str, Answer]
Judgements = Iterator[tuple[str, Judgement]]


def ok(observed: str) -> Judgement:
    """The node is healthy."""
    return Judgement("OK", observed)


def not_here(observed: str) -> Judgement:
    """The node lacks the hardware that the check is about."""
    return Judgement("N/A", observed)


def warn(observed: str, *, expected: str = "", fix: str) -> Judgement:
    """A training will run, but slower or at a risk."""
    return Judgement("WARN", observed, expected, fix)


def fail(observed: str, *, expected: str = "", fix: str) -> Judgement:
    """A training would hang, crash or go wrong."""
    return Judgement("FAIL", observed, expected, fix)


def unknown(observed: str, *, expected: str = "", fix: str = "") -> Judgement:
    """A tool, rights or a readable answer are missing."""
    return Judgement("UNKNOWN", observed, expected, fix)


@dataclass(frozen=True)
class Check:
    """A check, with the attributes of the module's docstring. ``about`` names the sources of formats and limits."""

    id: str
    title: str
    why: str
    judge: Callable[[Plan, Answers], Judgements]
    probe: str | Callable[..., str] = ""
    level: int = 0
    tool: str = ""
    timeout: float = 10.0
    root: bool = False
    bundle: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    hung: Verdict = "UNKNOWN"
    hung_fix: str = ""
    absent: Verdict = "N/A"
    absent_fix: str = ""
    measure: str = ""
    about: str = ""

    def probe_for(self, plan: Plan, node: Node) -> str:
        """The sh to run on a node."""
        return self.probe if isinstance(self.probe, str) else call(self.probe, plan=plan, node=node)


def call(function: Callable[..., Any], **values: object) -> Any:
    """Calls a function with those of the values that its parameters name."""
    code = function.__code__
    return function(**{name: values[name] for name in code.co_varnames[: code.co_argcount]})


def judge_of(function: Callable[..., Any]) -> Callable[[Plan, Answers], Judgements]:
    """The judge of all answers, from a function that names ``answers`` or judges one ``answer``."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    if "answer" not in names:
        return lambda plan, answers: call(function, plan=plan, answers=answers, limits=plan.limits)

    def judge(plan: Plan, answers: Answers) -> Judgements:
        for node, answer in answers.items():
            yield node, call(function, plan=plan, node=node, answer=answer, limits=plan.limits)

    return judge


@cache
def ids() -> tuple[str, ...]:
    """The ids of all checks, sorted."""
    found = {name.replace("_", ".", 1) for name in _files() if "_" in name}
    return tuple(sorted(found | {each for name in _files() if "_" not in name for each in _declarations(name)}))


@cache
def _files() -> frozenset[str]:
    return frozenset(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


@cache
def _declarations(subject: str) -> Mapping[str, Check]:
    """The checks that a subject file declares."""
    if subject not in _files():
        return {}
    module = import_module(f"provision.checks.{subject}")
    names = vars(module)
    found = {each.id: each for each in (*names.get("CHECKS", ()), *names.values()) if isinstance(each, Check)}
    for check in found:
        if not check.startswith(f"{subject}."):
            raise ClusterctlError(f"{module.__file__} declares the check {check}: its ids must start with {subject}.")
    return found


def known(check: str) -> bool:
    """Whether there is a check with this id. Imports at most its subject file."""
    return ("." in check and check.replace(".", "_", 1) in _files()) or check in _declarations(check.partition(".")[0])


@cache
def load(check: str) -> Check:
    """A check, by an id that is known to exist."""
    name = check.replace(".", "_", 1)
    if name in _files():
        return _from_module(check, import_module(f"provision.checks.{name}"))
    return _declarations(check.partition(".")[0])[check]


def _from_module(check: str, module: ModuleType) -> Check:
    names = vars(module)
    given = {name: names[name.upper()] for name in _OPTIONS if name.upper() in names}
    return Check(
        check,
        names["TITLE"],
        names["WHY"],
        judge_of(names["judge"]),
        names.get("probe") or names.get("PROBE", ""),
        about=(module.__doc__ or "").partition("\n")[2],
        **given,
    )


_OPTIONS = (
    "level",
    "tool",
    "timeout",
    "root",
    "bundle",
    "limits",
    "hung",
    "hung_fix",
    "absent",
    "absent_fix",
    "measure",
)


def judged(name: str, plan: Plan, answers: Answers) -> Iterator[Finding]:
    """The check's finding for every answer; UNKNOWN if its tool is missing or hung."""
    check = load(name)
    good = {}
    absent = sum(answer.state == "absent" for answer in answers.values())
    for node, answer in answers.items():
        if answer.state == "missing":
            yield finding(name, node, unknown(f"{check.tool} is not installed", fix=f"install {check.tool}"))
        elif answer.state == "absent":
            observed = f"no {HARDWARE[name.partition('.')[0]]}, no {check.tool}"
            if check.absent == "N/A" or absent == len(answers):
                yield finding(name, node, not_here(observed))
                continue
            observed += f"; {len(answers) - absent} of the other {len(answers) - 1} nodes have it"
            yield finding(name, node, Judgement(check.absent, observed, fix=check.absent_fix))
        elif answer.state == "hung":
            observed = f"no answer from {check.tool or 'the probe'} within {check.timeout:g} s"
            yield finding(name, node, Judgement(check.hung, observed, fix=check.hung_fix))
        elif _ENDLESS.search(answer.out):
            yield finding(name, node, unknown(f"the answer has a number of more than {_DIGITS} digits"))
        else:
            good[node] = answer
    if good:
        yield from (finding(name, node, judgement) for node, judgement in check.judge(plan, good))


def finding(check: str, node: str, judgement: Judgement) -> Finding:
    """A judgement with the check's own title and reason."""
    verdict, observed, expected, fix = judgement
    if verdict in {"OK", "N/A"}:
        return Finding(check, node, verdict, observed)
    about = load(check)
    return Finding(check, node, verdict, observed, expected or about.title, about.why, fix)


# --- which checks run ------------------------------------------------------------------------------


def choose(options: CheckOptions, *, level: int, only: Sequence[str], bundle: bool) -> tuple[str, ...]:
    """The checks to run, sorted by id.

    Args:
        options: the inventory's; a check that is ``off`` runs only if ``only`` has its whole id.
        level: 0: passive checks; 1: those between nodes as well.
        only: ids, or first words of ids such as ``gpu``; empty for all. A whole id runs at any level.
        bundle: whether there is one to compare with; checks that need one are skipped without it.

    Raises:
        UsageError: ``only`` names no check, or only checks that need a bundle.
    """
    named = set(only) & set(ids())
    subjects = {each.partition(".")[0] for each in ids()}
    chosen = subjects & set(only)
    wrong = [each for each in only if each not in named | chosen]
    if wrong:
        hint = _close(wrong[0], ids() if "." in wrong[0] else subjects)
        raise UsageError(f"unknown check {wrong[0]!r}", hint=hint)
    wanted = [
        each
        for each in ids()
        if each in named
        or ((not only or each.partition(".")[0] in chosen) and each not in options.off and level >= load(each).level)
    ]
    usable = tuple(each for each in wanted if bundle or not load(each).bundle)
    if wanted and not usable:
        raise UsageError(f"{', '.join(wanted)}: needs a bundle to compare with", hint="clusterctl check BUNDLE")
    if not usable:
        raise UsageError("no check is left to run", hint="see checks: off: in the inventory, or use --level 1")
    return usable


def limits(check: str, options: CheckOptions) -> dict[str, float]:
    """A check's thresholds, overridden by the inventory's."""
    return {**load(check).limits, **options.limits.get(check, {})}


def problems(off: Iterable[str], wanted: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The errors in an inventory's ``checks:``, each with its place in it. Imports only the checks that it names."""
    for each in off:
        if not known(each):
            yield ("off",), f"unknown check {each!r:.80}; {_close(each, ids())}"
    for check, values in wanted.items():
        if not known(check):
            yield (check,), f"unknown check; {_close(check, ids())}"
            continue
        own = load(check).limits
        for name, value in values.items():
            if name not in own:
                yield (check, name), f"is no threshold of {check}; {_close(name, own) if own else 'it has none'}"
            elif isinstance(value, bool) or not isinstance(value, int | float):
                yield (check, name), f"must be a number, such as {own[name]:g}"
            elif value < 0:
                yield (check, name), f"must not be negative, such as {own[name]:g}"


def _close(name: str, names: Collection[str]) -> str:
    found = difflib.get_close_matches(name, list(names), n=1)
    if found:
        return f"did you mean {found[0]}?"
    if len(names) <= 20:
        return f"known: {', '.join(sorted(names))}"
    return "docs/checks.md lists all of them"
