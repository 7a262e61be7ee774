"""``clusterctl check``: what the checks of ``provision/checks`` find on every node, before a training does.

Every node is asked once, by one script that holds the probes of all checks; those that need root's rights are asked
again as root where the ssh user is another one. All judging is done here, over the answers of all nodes.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Protocol, cast

from provision import checks
from provision.checks import Answer, Plan, choose, limits
from provision.checks.kit.probing import compile_probes, parse, probe_of
from provision.errors import ClusterctlError, within
from provision.hints import complete
from provision.inventory import fold
from provision.model import Emit, Finding, Inventory, Node, Notice, Progress, StageFinished, StageStarted
from provision.script import FROM_INPUT
from provision.ssh.remote import Connections, RootRefused, fan_out, reading
from provision.tasks.answers import reason

if TYPE_CHECKING:
    from provision.env.bundle.manifest import Manifest
    from provision.ssh.prompts import Prompts

DEADLINE = 60.0  # seconds for a node; more than any probe may take
_GRACE = 15.0  # seconds more until the connection is given up: a script ends by itself before
_STAGE = "check"
_AT_ONCE = 32  # nodes

Answers = Mapping[str, Mapping[str, Answer]]  # by check, by node


class _Measure(Protocol):
    """A file of ``tasks/measures``."""

    def measure(self, plan: Plan, connections: Connections, emit: Emit) -> Mapping[str, Answer]:
        """Answers by node name; a node that could not take part has one that says so."""
        ...


@dataclass(frozen=True)
class CheckResult:
    """What was found.

    Attributes:
        findings: by check, in the order of their ids, and by node, in the inventory's.
        checks: the ids of the checks that were run.
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


def check(
    inventory: Inventory,
    nodes: Sequence[Node],
    *,
    level: int = 0,
    only: Sequence[str] = (),
    manifest: Manifest | None = None,
    root: bool | None = None,
    deadline: float = DEADLINE,
    prompts: Prompts | None = None,
    emit: Emit,
) -> CheckResult:
    """Look at nodes and judge what they answer. Changes nothing on them.

    Args:
        inventory: the cluster; its ``checks:`` section has thresholds, and checks that are not run.
        nodes: those of its nodes that are meant.
        level: 0: what every node says about itself; 1: what is between nodes as well.
        only: ids of checks, or first words of ids such as ``gpu``; empty for all.
        manifest: of the bundle that is to run on the nodes; without it, checks that compare with one are left out.
        root: whether probes that need root's rights get them: True also where sudo asks for a password, None only where
            it does not, False never.
        deadline: seconds for a node; what is not known by then is UNKNOWN.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: ``only`` names no check.
    """
    began = time.monotonic()
    chosen = choose(inventory.checks, level=level, only=only, bundle=manifest is not None)
    plan = Plan(inventory, tuple(nodes), manifest, user=inventory.ssh.user or "")
    probed = tuple(each for each in chosen if not checks.load(each).measure)
    asked = prompts if root else _NoSudo.of(prompts)
    with Connections(inventory, asked) as connections:
        visit = _Visit(plan, probed, connections, deadline, root is not False)
        found, unreachable = _visit_all(visit, emit)
        there = tuple(node for node in plan.nodes if node.name in found)
        measured = _measured(replace(plan, nodes=there), chosen, connections, emit) if there else {}
    answers: Answers = {each: {name: told[each] for name, told in found.items()} for each in probed} | dict(measured)
    said = (finding for each in chosen for finding in judge(each, plan, answers[each])) if there else ()
    findings = tuple(replace(finding, fix=complete(inventory.typed, finding.fix)) for finding in said)
    return CheckResult(findings, chosen, tuple(found), unreachable, time.monotonic() - began)


class _Visit:
    """One node's share: every probe, in one script, or two where root is somebody else."""

    def __init__(
        self, plan: Plan, probed: tuple[str, ...], connections: Connections, deadline: float, as_root: bool
    ) -> None:
        self.plan = plan
        self.refused: dict[str, RootRefused] = {}
        self._probed = probed
        self._connections = connections
        self._deadline = deadline
        self._for_root = [each for each in probed if as_root and checks.load(each).root]

    def __call__(self, node: Node) -> dict[str, Answer]:
        if not self._probed:  # measures only: whether it can be reached is all that is asked
            self._connections[node].run(":", deadline=self._deadline)
            return {}
        answers = self._ask(node, self._probed, root=False)
        if self._for_root and not any(answer.root for answer in answers.values()):
            try:
                answers |= self._ask(node, self._for_root, root=True)
            except RootRefused as refused:
                self.refused[node.name] = refused
        return answers

    def _ask(self, node: Node, wanted: Sequence[str], *, root: bool) -> dict[str, Answer]:
        probes = [probe_of(each, replace(self.plan, limits=limits(each, self.plan.inventory.checks)), node)
                  for each in wanted]  # fmt: skip
        script = compile_probes(probes, token=secrets.token_hex(8), limit=math.ceil(self._deadline))
        result = self._connections[node].run(
            FROM_INPUT, stdin=[script.text.encode()], deadline=self._deadline + _GRACE, root=root
        )
        with reading(node):
            return parse(script, result.out)


def _visit_all(visit: _Visit, emit: Emit) -> tuple[dict[str, dict[str, Answer]], dict[str, str]]:
    """Every node's answers by check, and the reasons of nodes that gave none."""
    nodes, began = visit.plan.nodes, time.monotonic()
    emit(StageStarted(_STAGE, f"Looking at {len(nodes)} nodes" if len(nodes) > 1 else "Looking at 1 node", len(nodes)))
    waiting = {node.name for node in nodes}
    lock = Lock()

    def work(node: Node) -> dict[str, Answer]:
        try:
            return visit(node)
        finally:
            with lock:
                waiting.discard(node.name)
                note = f"waiting for {fold(node.name for node in nodes if node.name in waiting)}" if waiting else ""
                emit(Progress(_STAGE, len(nodes) - len(waiting), len(nodes), note))

    outcomes = fan_out(nodes, work, limit=_AT_ONCE)
    unreachable = {
        node.name: reason(outcome, visit.plan.inventory, node)
        for node in nodes
        if isinstance(outcome := outcomes[node.name], ClusterctlError)
    }
    states = {name: within("unreachable: {}", why) for name, why in unreachable.items()}
    emit(StageFinished(_STAGE, time.monotonic() - began, states))
    if visit.refused:
        why = next(iter(visit.refused.values()))
        names = fold(node.name for node in nodes if node.name in visit.refused)
        emit(Notice(f"{names}: not as root, so some of it stays unknown: {why.reason}"))
    found = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, ClusterctlError)}
    return found, unreachable


def _measured(plan: Plan, chosen: Sequence[str], connections: Connections, emit: Emit) -> Answers:
    """What is between nodes; each measure is taken once, however many checks read it."""
    taken: dict[str, Mapping[str, Answer]] = {}
    found: dict[str, Mapping[str, Answer]] = {}
    for each in chosen:
        name = checks.load(each).measure
        if not name:
            continue
        if name not in taken:
            measure = cast("_Measure", import_module(f"provision.tasks.measures.{name}"))
            taken[name] = measure.measure(plan, connections, emit)
        found[each] = taken[name]
    return found


def judge(check: str, plan: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """What a check says about every node, in the order of the nodes.

    A judge that fails has met an answer that it was not written for: that is one check less on the node that gave it,
    or where the answers of several nodes make it fail together, on all; never the end of all checks.
    """
    seen = replace(plan, limits=limits(check, plan.inventory.checks))
    found, mistake = _judged(check, seen, answers)
    if mistake:
        alone = {name: _judged(check, seen, {name: answer})[1] for name, answer in answers.items()}
        good = {name: answer for name, answer in answers.items() if not alone[name]}
        again = _judged(check, seen, good) if 0 < len(good) < len(answers) else ({}, mistake)
        found = again[0] | {
            name: checks.finding(check, name, checks.unknown(said, fix="report it, with this check's output"))
            for name in answers
            if (said := alone[name] or again[1])
        }
    for node in plan.nodes:
        if node.name in answers:
            nothing = checks.unknown("the check reports nothing about this node")
            yield found.get(node.name) or checks.finding(check, node.name, nothing)


def _judged(check: str, seen: Plan, answers: Mapping[str, Answer]) -> tuple[dict[str, Finding], str]:
    """The findings by node; or none, and what the judge failed at."""
    try:
        return {finding.node: finding for finding in checks.judged(check, seen, answers)}, ""
    except Exception as error:  # noqa: BLE001 - whatever it is
        text = " ".join(str(error).split())[:200]
        return {}, f"the check does not understand an answer ({type(error).__name__}: {text})"


class _NoSudo:
    """Answers all questions but the one for sudo's password."""

    def __init__(self, prompts: Prompts) -> None:
        self.confirm_host_key: Callable[[Node, str, str], bool] = prompts.confirm_host_key
        self.password: Callable[[str, str], str | None] = prompts.password

    @classmethod
    def of(cls, prompts: Prompts | None) -> Prompts | None:
        """``prompts``, if there is anybody to ask."""
        return cls(prompts) if prompts else None

    def sudo_password(self, _user: str, _where: str) -> str | None:
        """None: nobody is asked."""
        return None
