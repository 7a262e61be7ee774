"""``clusterctl check``: runs the checks of ``provision/checks`` on every node.

Every node runs one script with the probes of all checks. Probes that need root run again as root if the ssh user is not
root. The controller judges the answers of all nodes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from provision import checks
from provision.checks import Answer, Plan, choose, limits
from provision.checks.kit.probing import compile_probes, parse, probe_of
from provision.env.text import number
from provision.hints import complete
from provision.inventory import fold
from provision.model import Finding, Node, Notice
from provision.script import FROM_INPUT
from provision.ssh.remote import RootRefused, reading

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest
    from provision.session import Outcome, Session

DEADLINE = 60.0  # seconds for a node; more than any probe may take
_GRACE = 15.0  # seconds more until the connection times out: the script ends earlier
AT_ONCE = 32  # nodes

Answers = Mapping[str, Mapping[str, Answer]]  # by check, by node


def at_once(nodes: int) -> int:
    """How many of so many nodes are checked at a time. A node's probes wait more than they compute."""
    return max(AT_ONCE, nodes // 8)


class _Measure(Protocol):
    """A file of ``tasks/measures``."""

    def measure(self, plan: Plan, session: Session) -> Mapping[str, Answer]:
        """Answers by node name; the answer of a node that could not take part has the reason."""
        ...


@dataclass(frozen=True)
class CheckOptions:
    """The options of ``check``.

    Attributes:
        level: 0: each node alone; 1: also ports, clocks and shares between nodes.
        only: ids of checks or of groups, such as ``gpu``; empty for all.
        manifest: the manifest of the bundle that will run on the nodes; without it, checks that need one are skipped.
        root: whether probes that need root get it. True: also if sudo asks for a password; None: only if it does not;
            False: never.
        deadline: seconds for each node; unfinished checks are UNKNOWN.
    """

    level: int = 0
    only: Sequence[str] = ()
    manifest: Manifest | None = None
    root: bool | None = None
    deadline: float = DEADLINE


@dataclass(frozen=True)
class CheckResult:
    """The result of ``check``.

    Attributes:
        findings: by check, in the order of their ids, and by node, in the inventory's.
        checks: the ids of the checks that ran.
        nodes: the names of the nodes that answered.
        unreachable: the others, each with its reason.
        seconds: how long it took.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    nodes: tuple[str, ...]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def having(self, verdict: str) -> tuple[Finding, ...]:
        """The findings with this verdict."""
        return tuple(finding for finding in self.findings if finding.verdict == verdict)


def check(session: Session, options: CheckOptions) -> CheckResult:
    """Examine nodes and judge their answers. Changes nothing on them.

    The inventory's ``checks:`` section has thresholds and the checks to skip.

    Raises:
        UsageError: ``only`` names no check.
    """
    inventory = session.inventory
    chosen = choose(inventory.checks, level=options.level, only=options.only, bundle=options.manifest is not None)
    plan = Plan(inventory, session.nodes, options.manifest, user=inventory.ssh.user or "")
    probed = tuple(each for each in chosen if not checks.load(each).measure)
    outcome = _visit(session, plan, probed, options)
    there = outcome.of(session.nodes)
    answers: Answers = {
        **{each: {name: visit.answers[each] for name, visit in outcome.ok.items()} for each in probed},
        **_measured(session, replace(plan, nodes=there), chosen),
    }
    found = (finding for each in chosen for finding in judge(each, plan, answers[each])) if there else ()
    findings = tuple(
        replace(finding, fix=complete(session.typed, finding.fix)) if finding.fix else finding for finding in found
    )
    names = tuple(node.name for node in there)
    return CheckResult(findings, chosen, names, outcome.reasons, sum(session.seconds.values()))


@dataclass(frozen=True)
class _Visit:
    """A node's answers by check, and the reason if probes could not run as root."""

    answers: dict[str, Answer]
    refused: RootRefused | None = None


def _visit(session: Session, plan: Plan, probed: Sequence[str], options: CheckOptions) -> Outcome[_Visit]:
    """Run every probe on every node, in one script, or in two if the ssh user is not root."""
    for_root = [each for each in probed if options.root is not False and checks.load(each).root]

    plans = {each: replace(plan, limits=limits(each, plan.inventory.checks)) for each in probed}

    def ask(node: Node, wanted: Sequence[str], *, root: bool) -> dict[str, Answer]:
        probes = [probe_of(each, plans[each], node) for each in wanted]
        script = compile_probes(probes, token=secrets.token_hex(8), limit=math.ceil(options.deadline))
        stdin, deadline = script.text.encode(), options.deadline + _GRACE
        result = session.run(node, FROM_INPUT, stdin=stdin, deadline=deadline, root=root)
        with reading(node):
            return parse(script, result.out)

    def visit(node: Node) -> _Visit:
        if not probed:  # measures only: test the connection
            session.run(node, ":", deadline=options.deadline)
            return _Visit({})
        answers = ask(node, probed, root=False)
        if not for_root or any(answer.root for answer in answers.values()):
            return _Visit(answers)
        try:
            return _Visit(answers | ask(node, for_root, root=True))
        except RootRefused as refused:
            return _Visit(answers, refused)

    outcome = session.work(
        "check", f"Checking {number(len(session.nodes), 'node')}", visit, limit=at_once(len(session.nodes))
    )
    if refused := {name: visit.refused for name, visit in outcome.ok.items() if visit.refused}:
        why = next(iter(refused.values())).reason
        session.emit(Notice(f"{fold(refused)}: root is not available, so some checks stay UNKNOWN: {why}"))
    return outcome


def _measured(session: Session, plan: Plan, chosen: Sequence[str]) -> Answers:
    """The measures between nodes. Each runs once, even if several checks use it."""
    taken: dict[str, Mapping[str, Answer]] = {}
    found: dict[str, Mapping[str, Answer]] = {}
    for each in chosen if plan.nodes else ():
        name = checks.load(each).measure
        if not name:
            continue
        if name not in taken:
            measure = cast("_Measure", import_module(f"provision.tasks.measures.{name}"))
            taken[name] = measure.measure(plan, session)
        found[each] = taken[name]
    return found


def judge(check: str, plan: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """The findings of a check about every node, in the order of the nodes.

    A judge raises for an answer that it was not written for. That node's finding is UNKNOWN, or all nodes' findings if
    only their answers together make it raise. Other checks are not affected.
    """
    seen = replace(plan, limits=limits(check, plan.inventory.checks))
    found, mistake = _judged(check, seen, answers)
    if mistake:
        alone = {name: _judged(check, seen, {name: answer})[1] for name, answer in answers.items()}
        good = {name: answer for name, answer in answers.items() if not alone[name]}
        again = _judged(check, seen, good) if 0 < len(good) < len(answers) else ({}, mistake)
        found = again[0] | {
            name: checks.finding(
                check, name, checks.unknown(reason, fix="report it as a bug, with the output of this check")
            )
            for name in answers
            if (reason := alone[name] or again[1])
        }
    for node in plan.nodes:
        if node.name in answers:
            nothing = checks.unknown("the check reports nothing about this node")
            yield found.get(node.name) or checks.finding(check, node.name, nothing)


def _judged(check: str, seen: Plan, answers: Mapping[str, Answer]) -> tuple[dict[str, Finding], str]:
    """The findings by node; or none, and the judge's error."""
    try:
        return {finding.node: finding for finding in checks.judged(check, seen, answers)}, ""
    except Exception as error:  # noqa: BLE001 - judges may raise anything
        text = " ".join(str(error).split())[:200]
        return {}, f"the check does not understand an answer ({type(error).__name__}: {text})"
