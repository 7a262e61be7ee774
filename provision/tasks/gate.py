"""The gate: what would let a run hang, crash or meet another one is found before anything is started.

Between the nodes' preparation and the launcher: one place that refuses. All nodes are asked at once, in two round trips
beside that of the preparation; what they said is judged by the checks and by ``provision/run/readiness.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from provision.errors import ClusterctlError, PreflightError
from provision.hints import again
from provision.model import Emit, Finding, Inventory, Node, Notice, StageFinished, StageStarted
from provision.run import Facts, Travel, readiness
from provision.ssh.remote import Connections
from provision.tasks import prepare
from provision.tasks.check import judge
from provision.tasks.gate_ask import Question, Said, ask, of
from provision.tasks.prepare import Answer, Asked


@dataclass(frozen=True)
class GateOptions:
    """How strict the gate is.

    Attributes:
        exclude_bad: go on with the nodes that can take part.
        force: go on with all of them.
        port: the MASTER_PORT that is wanted; None: the inventory's, else any that is free on rank 0.
        visible: by node name, the CUDA_VISIBLE_DEVICES that the run will have; all GPUs of nodes not named.
        asked: how many nodes were asked for, where a number was.
        scratch: of a dry run, the temporary folder on the nodes that the agent goes to, in place of the run's folder.
    """

    exclude_bad: bool = False
    force: bool = False
    port: int | None = None
    visible: Mapping[str, str] = field(default_factory=dict)
    asked: int | None = None
    scratch: str = ""


@dataclass(frozen=True)
class Gated:
    """What has passed.

    Attributes:
        nodes: those that take part, in the order of their ranks.
        answers: of these, by name.
        dropped: the others, each with its reason.
        findings: about all nodes that answered, those that are OK too.
    """

    nodes: tuple[Node, ...]
    answers: Mapping[str, Answer]
    dropped: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()


@contextmanager
def gate(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    run: str,
    luggage: Travel | None,
    options: GateOptions,
    emit: Emit,
) -> Iterator[Gated]:
    """Every node that takes part, with the run's folder on it; when the block raises, the folders go again.

    Args:
        inventory: the cluster.
        nodes: in the order of their ranks.
        connections: to them.
        run: its id.
        luggage: what travels; None where the run's folder is there already, which then stays whatever happens.
        options: how strict it is.
        emit: is told about progress, warnings and dropped nodes.

    Raises:
        PreflightError: nodes that cannot take part; nothing was started.
        NodesFailedError: nodes that cannot be reached; nothing was started.
        InterruptedByUser: Ctrl-C; nothing was started.
    """
    port = options.port or inventory.train.port
    began = time.monotonic()
    emit(StageStarted("prepare", "Preparing nodes", len(nodes), "nodes"))
    asked = prepare.prepare(inventory, nodes, connections, run, luggage, port=port, scratch=options.scratch)
    try:
        states = {name: _state(answer.facts) for name, answer in asked.items() if isinstance(answer, Answer)}
        emit(StageFinished("prepare", time.monotonic() - began, states, failed=len(nodes) - len(states)))
        passage = _Passage(inventory, tuple(nodes), connections, run, luggage, options, emit, asked)
        passed = passage.through()
        if passed.dropped and all(answer.made for answer in passed.answers.values()):  # no folder is shared
            out = [node for node in nodes if node.name in passed.dropped]
            prepare.withdraw(inventory, out, connections, run, asked, scratch=options.scratch)
        yield passed
    except (ClusterctlError, KeyboardInterrupt):
        if luggage is not None:
            prepare.withdraw(inventory, nodes, connections, run, asked, scratch=options.scratch)
        raise


@dataclass
class _Passage:
    """One attempt to get through, over as many rounds as nodes are dropped in."""

    inventory: Inventory
    nodes: tuple[Node, ...]
    connections: Connections
    run: str
    luggage: Travel | None
    options: GateOptions
    emit: Emit
    asked: Asked
    dropped: dict[str, str] = field(default_factory=dict)

    def through(self) -> Gated:
        """The nodes that take part."""
        left = self._answered()
        answers = {node.name: answer for node in left if isinstance(answer := self.asked[node.name], Answer)}
        if left[0] != self.nodes[0]:
            left, answers = self._again(left)
        said: Said | None = None
        while True:
            if said is None:
                said = self._ask(left, answers)
            answers = {node.name: _ranked(answers[node.name], rank) for rank, node in enumerate(left)}
            findings = tuple(self._judged(left, answers, said))
            bad = readiness.reasons(left, findings)
            if not bad:
                break
            facts = {name: answer.facts for name, answer in answers.items()}
            if self.options.force and not (set(readiness.hopeless(left, facts)) & set(bad)):
                for name, why in bad.items():
                    self.emit(Notice(f"forced: {name}: {why}", "warning"))
                break
            rest = tuple(node for node in left if node.name not in bad)
            if not self.options.exclude_bad or not rest:
                raise self._refused(left, bad, rest)
            self.dropped |= bad
            if rest[0] == left[0]:
                left = rest
            else:  # what every node said about the way to rank 0 was about another one
                left, answers = self._again(rest)
                said = None
        self._tell(left, findings)
        return Gated(left, answers, dict(self.dropped), findings)

    def _answered(self) -> tuple[Node, ...]:
        """The nodes that are prepared, when those that are not may be left out."""
        lost = prepare.missing(self.inventory, self.nodes, self.asked)
        left = tuple(node for node in self.nodes if node.name not in lost)
        if lost and not (self.options.exclude_bad and left):
            raise prepare.unreachable(self.inventory, self.nodes, self.asked) or self._refused(self.nodes, lost, left)
        self.dropped |= lost
        return left

    def _again(self, left: tuple[Node, ...]) -> tuple[tuple[Node, ...], dict[str, Answer]]:
        """Ask the agents once more, since rank 0 is another node; whoever gives no answer any more is dropped."""
        while True:
            port = self.options.port or self.inventory.train.port
            asked = prepare.prepare(
                self.inventory, left, self.connections, self.run, None, port=port, scratch=self.options.scratch
            )
            lost = prepare.missing(self.inventory, left, asked)
            rest = tuple(node for node in left if node.name not in lost)
            if not rest:
                raise self._refused(left, lost, rest)
            self.dropped |= lost
            if rest[0] == left[0]:
                break
            left = rest
        before = {name: answer for name, answer in self.asked.items() if isinstance(answer, Answer)}
        return rest, {
            node.name: replace(answer, made=before[node.name].made)
            for node in rest
            if isinstance(answer := asked[node.name], Answer)
        }

    def _ask(self, nodes: tuple[Node, ...], answers: Mapping[str, Answer]) -> Said:
        began = time.monotonic()
        self.emit(StageStarted("gate", "Looking for what would stop the run", len(nodes), "nodes"))
        said = ask(self._question(nodes, answers), self.connections)
        self.emit(StageFinished("gate", time.monotonic() - began, dict(said.lost), failed=len(said.lost)))
        return said

    def _question(self, nodes: tuple[Node, ...], answers: Mapping[str, Answer]) -> Question:
        head = answers[nodes[0].name].facts
        train = replace(self.inventory.train, port=head.port)
        return Question(
            replace(self.inventory, train=train),
            nodes,
            self.options.scratch or str(prepare.run_folder(self.inventory, self.run)),
            self.luggage.there if self.luggage else (),
            gpus=any(answer.facts.gpus for answer in answers.values()),
            link=head.link_port,
        )

    def _judged(self, nodes: tuple[Node, ...], answers: Mapping[str, Answer], said: Said) -> Iterator[Finding]:
        """All findings about these nodes."""
        question = self._question(nodes, answers)
        facts = {name: answer.facts for name, answer in answers.items()}
        yield from readiness.reachable(nodes, facts)
        yield from readiness.machines(nodes, facts)
        yield from readiness.releases(nodes, {name: answer.release for name, answer in answers.items()})
        yield from readiness.room(nodes, facts)
        yield from readiness.runs(nodes, facts, self.options.visible)
        yield from readiness.linked(nodes, said.ports, question.link)
        found = (
            finding
            for check, each in said.answers.items()
            if check != readiness.GPU_CHECK
            for finding in judge(check, question.plan, of(each, nodes))
        )
        yield from readiness.weighed(found, facts)
        yield from readiness.busy(nodes, said.answers.get(readiness.GPU_CHECK, {}), facts, self.options.visible)
        names = {node.name for node in nodes}
        for path, by_node in said.content.items():
            here = {name: each for name, each in by_node.items() if name in names}
            yield from readiness.compare_content(path, here, what=_key(self.luggage, path))
        for name, why in said.lost.items():
            if name in names:
                yield Finding("gate.lost", name, "FAIL", why)

    def _refused(self, nodes: Sequence[Node], bad: Mapping[str, str], rest: Sequence[Node]) -> PreflightError:
        command, typed = "resume" if self.luggage is None else "train", self.inventory.typed
        way = "" if self.options.force else "to go on all the same: " + again(typed, command, "--force")
        if not all(isinstance(self.asked[name], Answer) for name in bad):
            way = "to bring the environment: clusterctl deploy"
        exclude = again(typed, command, "--exclude-bad") if command == "train" else ""
        return readiness.refusal(nodes, bad, rest, exclude=exclude, way=way)

    def _tell(self, left: tuple[Node, ...], findings: Sequence[Finding]) -> None:
        for text in readiness.warnings(findings):
            self.emit(Notice(text, "warning"))
        spare = [node.name for node in self.inventory.nodes if node not in self.nodes]
        asked, typed = self.options.asked, self.inventory.typed
        for text in readiness.dropped(self.nodes, left, self.dropped, spare=spare, asked=asked, typed=typed):
            self.emit(Notice(text, "warning"))


def _key(luggage: Travel | None, path: str) -> str:
    """What the configuration calls a path; "" where it does not name it itself."""
    settings = luggage.settings if luggage else {}
    return next((key for key, value in settings.items() if isinstance(value, str) and path in value.split(",")), "")


def _ranked(answer: Answer, rank: int) -> Answer:
    return answer if answer.facts.rank == rank else replace(answer, facts=replace(answer.facts, rank=rank))


def _state(facts: Facts) -> str:
    """A prepared node in a few words."""
    gpus = f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else f"no GPU, {facts.cpus} cores"
    return f"{facts.interface or 'no interface'}, {gpus}"
