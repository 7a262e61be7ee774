"""The gate: refuses a run that would hang, crash or collide with another run, before anything starts.

It sends the run's folder to every node and collects facts: hardware, and the path to rank 0. Then it asks all nodes at
once, in two round trips. The checks and ``provision/run/readiness.py`` judge the answers.
"""

from __future__ import annotations

import hashlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.checks import Answer as Probed
from provision.checks import Plan, limits
from provision.checks.kit.probing import compile_probes, parse, probe_of
from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError, PreflightError
from provision.model import Finding, Inventory, Node
from provision.render import quote, render
from provision.run import Facts, RunFiles, needs, readiness, tar_stream
from provision.run.files import sources
from provision.run.readiness import Content
from provision.script import FROM_INPUT
from provision.session import Failure, Outcome
from provision.ssh.remote import reading
from provision.tasks.check import judge
from provision.tasks.measures.talk import TalkAnswers, talk, talk_script
from provision.tasks.runs import run_folder
from provision.tasks.status import status_script
from trainer.agent.contract.statuses import SCRIPT

if TYPE_CHECKING:
    from provision.session import Session

# The checks that predict a hang or a crash and are not covered by the agent's facts. On every node:
ALWAYS = ("fs.mount", "fs.readonly", "fs.stale", "fs.tmp", "env.noexec", "mem.shm", "lim.memlock", "net.loopback")
# on nodes with GPUs:
WITH_GPUS = (
    *("gpu.driver", "gpu.recovery", "gpu.ecc", "gpu.computemode", "gpu.fabric", "gpu.fm", "gpu.nodes", "gpu.used"),
    *("gpu.xid", "ib.state"),
)
# with several nodes:
BETWEEN = ("env.vars", "net.docker0", "net.duplicate", "net.iface", "net.route")
PORTS = ("net.master", "net.ephemeral")
CLOCK = ("clock.skew",)

LOCAL = "local"  # instead of a release's name: an environment that clusterctl did not deploy
_PREPARE_DEADLINE = 600.0
_PROBE_DEADLINE = 30.0
_REMOVE_DEADLINE = 30.0
_ANSWERS = 10.0  # seconds that an interrupted command waits for nodes that may be creating the folder
_DEADLINE = 15.0  # seconds for the probes of a node; a later answer counts as UNKNOWN
_GRACE = 10.0  # further seconds before the connection is closed
_READING = 2.0  # seconds in which a node reads its data and models


@dataclass(frozen=True)
class GateOptions:
    """How strict the gate is.

    Attributes:
        exclude_bad: continue with the nodes that can take part.
        force: continue with all nodes.
        port: the requested MASTER_PORT; None: the inventory's, else any free one on rank 0.
        visible: by node name, the run's CUDA_VISIBLE_DEVICES; all GPUs of nodes not named.
        asked: the requested number of nodes, if there was one.
        scratch: the temporary folder of a dry run on the nodes, in place of the run's folder.
    """

    exclude_bad: bool = False
    force: bool = False
    port: int | None = None
    visible: Mapping[str, str] = field(default_factory=dict)
    asked: int | None = None
    scratch: str = ""


@dataclass(frozen=True)
class Answer:
    """A prepared node.

    Attributes:
        release: the node's current release, or ``LOCAL``.
        facts: the facts from its agent.
        created: whether this node created the run's folder, which it may share with other nodes.
    """

    release: str
    facts: Facts
    created: bool = False

    def prefix(self, inventory: Inventory) -> PurePosixPath:
        """The release's path, which does not change with the next deploy."""
        return inventory.prefix if self.release == LOCAL else inventory.root / "releases" / self.release


@dataclass(frozen=True)
class GateResult:
    """The nodes that passed the gate.

    Attributes:
        nodes: in the order of their ranks.
        answers: by node name, the answers of these nodes.
        dropped: the other nodes, each with its reason.
        findings: all findings about nodes that answered, including OK.
        content: by path, the data and models of the run on the first of the nodes.
    """

    nodes: tuple[Node, ...]
    answers: Mapping[str, Answer]
    dropped: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    content: Mapping[str, Content] = field(default_factory=dict)


@dataclass(frozen=True)
class GateAnswers:
    """The nodes' answers to the gate.

    Attributes:
        answers: by check and by node.
        content: by path and by node.
        ports: the agents' answers about ports.
        lost: nodes with a broken connection, each with its reason.
    """

    answers: Mapping[str, Mapping[str, Probed]] = field(default_factory=dict)
    content: Mapping[str, Mapping[str, Content]] = field(default_factory=dict)
    ports: Mapping[str, Probed] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """The gate's question to the nodes.

    Attributes:
        inventory: the cluster, with this run's MASTER_PORT as its ``train.port``.
        nodes: in the order of their ranks.
        folder: the run's folder on the nodes.
        paths: absolute paths with the same content on every node.
        gpus: whether any node has GPUs.
        link: the port of rank 0's agent; None if it has none.
    """

    inventory: Inventory
    nodes: tuple[Node, ...]
    folder: str
    paths: tuple[str, ...] = ()
    gpus: bool = False
    link: int | None = None

    @property
    def plan(self) -> Plan:
        """The question as a plan for checks."""
        return Plan(self.inventory, self.nodes, user=self.inventory.ssh.user or "")

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks to run, without the inventory's ``off``."""
        several = len(self.nodes) > 1
        wanted = (*ALWAYS, *(WITH_GPUS if self.gpus else ()), *(BETWEEN if several else ()))
        return tuple(each for each in wanted if each not in self.inventory.checks.off)


@contextmanager
def gate(
    session: Session, nodes: Sequence[Node], run: str, files: RunFiles | None, options: GateOptions
) -> Iterator[GateResult]:
    """Yield the nodes that passed, with the run's folder on them. Removes the folders if the block raises.

    Args:
        session: the command's session.
        nodes: in the order of their ranks.
        run: its id.
        files: the files to send; None if the nodes have the run's folder, which then stays in any case.
        options: how strict it is. The folder of a dry run is always removed.

    Raises:
        PreflightError: nodes cannot take part; nothing was started.
        NodesFailedError: nodes do not answer; nothing was started.
        InterruptedByUser: Ctrl-C; nothing was started.
    """
    port = options.port or session.inventory.train.port
    asked = prepare(session, nodes, run, files, port=port, scratch=options.scratch)
    try:
        passed = _Attempt(session, tuple(nodes), run, files, options, asked).result()
        if passed.dropped and all(answer.created for answer in passed.answers.values()):  # no folder is shared
            out = [node for node in nodes if node.name in passed.dropped]
            remove_folders(asked, out, run, scratch=options.scratch)
        yield passed
    except (ClusterctlError, KeyboardInterrupt):
        if files is not None:
            remove_folders(asked, nodes, run, scratch=options.scratch)
        raise
    if options.scratch:
        remove_folders(asked, nodes, run, scratch=options.scratch)


@dataclass
class _Attempt:
    """One attempt to pass, over as many rounds as it takes to drop nodes."""

    session: Session
    nodes: tuple[Node, ...]
    run: str
    files: RunFiles | None
    options: GateOptions
    asked: Outcome[Answer]
    dropped: dict[str, str] = field(default_factory=dict)

    def result(self) -> GateResult:
        """The nodes that take part."""
        left = self._answered()
        answers = {node.name: self.asked.ok[node.name] for node in left}
        if left[0] != self.nodes[0]:
            left, answers = self._ask_again(left)
        replies: GateAnswers | None = None
        while True:
            if replies is None:
                replies = self._ask(left, answers)
            answers = {node.name: _ranked(answers[node.name], rank) for rank, node in enumerate(left)}
            findings = tuple(self._findings(left, answers, replies))
            bad = readiness.reasons(left, findings)
            if not bad:
                break
            facts = {name: answer.facts for name, answer in answers.items()}
            if self.options.force and not (set(readiness.hopeless(left, facts)) & set(bad)):
                for name, why in bad.items():
                    self.session.warn(f"forced: {name}: {why}")
                break
            rest = tuple(node for node in left if node.name not in bad)
            if not self.options.exclude_bad or not rest:
                raise self._refused(left, bad, rest)
            self.dropped |= bad
            if rest[0] == left[0]:
                left = rest
            else:  # rank 0 is another node now, so every node's answers about it are void
                left, answers = self._ask_again(rest)
                replies = None
        self._warn(left, findings)
        content = {path: each[left[0].name] for path, each in replies.content.items() if left[0].name in each}
        return GateResult(left, answers, dict(self.dropped), findings, content)

    def _answered(self) -> tuple[Node, ...]:
        """The prepared nodes, if the others may be dropped."""
        lost, left = self.asked.reasons, self.asked.of(self.nodes)
        if lost and not (self.options.exclude_bad and left):
            raise unreachable(self.asked) or self._refused(self.nodes, lost, left)
        self.dropped |= lost
        return left

    def _ask_again(self, left: tuple[Node, ...]) -> tuple[tuple[Node, ...], dict[str, Answer]]:
        """Ask the agents again, because rank 0 is another node now. Nodes that no longer answer are dropped."""
        port = self.options.port or self.session.inventory.train.port
        while True:
            asked = prepare(self.session, left, self.run, None, port=port, scratch=self.options.scratch)
            rest = asked.of(left)
            if not rest:
                raise self._refused(left, asked.reasons, rest)
            self.dropped |= asked.reasons
            if rest[0] == left[0]:
                break
            left = rest
        return rest, {
            node.name: replace(asked.ok[node.name], created=self.asked.ok[node.name].created) for node in rest
        }

    def _ask(self, nodes: tuple[Node, ...], answers: Mapping[str, Answer]) -> GateAnswers:
        with self.session.stage("gate", "Checking the nodes for the run", len(nodes), "nodes") as shown:
            replies = ask(self._question(nodes, answers), self.session)
            shown.states, shown.failed = replies.lost, len(replies.lost)
        return replies

    def _question(self, nodes: tuple[Node, ...], answers: Mapping[str, Answer]) -> Question:
        head = answers[nodes[0].name].facts
        inventory = self.session.inventory
        return Question(
            replace(inventory, train=replace(inventory.train, port=head.port)),
            nodes,
            self.options.scratch or str(run_folder(inventory, self.run)),
            self.files.there if self.files else (),
            gpus=any(answer.facts.gpus for answer in answers.values()),
            link=head.link_port,
        )

    def _findings(
        self, nodes: tuple[Node, ...], answers: Mapping[str, Answer], replies: GateAnswers
    ) -> Iterator[Finding]:
        """All findings about these nodes."""
        question = self._question(nodes, answers)
        facts = {name: answer.facts for name, answer in answers.items()}
        yield from readiness.reachable(nodes, facts)
        yield from readiness.machines(nodes, facts)
        yield from readiness.releases(nodes, {name: answer.release for name, answer in answers.items()})
        yield from readiness.room(nodes, facts)
        yield from needs.judge(nodes, facts, self.files.needs if self.files else ())
        if self.files is not None:
            is_shared = not all(answer.created for answer in answers.values())
            yield from readiness.best_model(nodes, self.files.settings, is_shared=is_shared)
        yield from readiness.runs(nodes, facts, self.options.visible)
        yield from readiness.linked(nodes, replies.ports, question.link)
        found = (
            finding
            for check, each in replies.answers.items()
            if check != readiness.GPU_CHECK
            for finding in judge(check, question.plan, _of_nodes(each, nodes))
        )
        yield from readiness.weighed(found, facts)
        yield from readiness.busy(nodes, replies.answers.get(readiness.GPU_CHECK, {}), facts, self.options.visible)
        names = {node.name for node in nodes}
        for path, by_node in replies.content.items():
            here = {name: each for name, each in by_node.items() if name in names}
            yield from readiness.compare_content(path, here, what=_key_of_path(self.files, path))
        for name, why in replies.lost.items():
            if name in names:
                yield Finding("gate.lost", name, "FAIL", why)

    def _refused(self, nodes: Sequence[Node], bad: Mapping[str, str], rest: Sequence[Node]) -> PreflightError:
        command = "resume" if self.files is None else "train"
        way = "" if self.options.force else "to continue anyway: " + self.session.again("--force", command=command)
        if not all(name in self.asked.ok for name in bad):
            way = "to bring the environment: clusterctl deploy"
        exclude = self.session.again("--exclude-bad", command=command) if command == "train" else ""
        return readiness.refusal(nodes, bad, rest, exclude=exclude, way=way)

    def _warn(self, left: tuple[Node, ...], findings: Sequence[Finding]) -> None:
        for text in readiness.warnings(findings):
            self.session.warn(text)
        spare = [node.name for node in self.session.inventory.nodes if node not in self.nodes]
        asked, typed = self.options.asked, self.session.typed
        for text in readiness.dropped(self.nodes, left, self.dropped, spare=spare, asked=asked, typed=typed):
            self.session.warn(text)


def ask(question: Question, session: Session) -> GateAnswers:
    """Ask all nodes everything: the probes of checks, and a talk with the agents, at the same time.

    Raises:
        InterruptedByUser: Ctrl-C.
    """
    several = len(question.nodes) > 1
    _ = session.connections  # created in this thread
    asked: dict[str, Callable[[], Any]] = {"checks": lambda: _probe(question, session)}
    if several or question.paths:
        asked["talk"] = lambda: _talk(question, session)
    done = _together(asked)
    talked: TalkAnswers = done.get("talk", TalkAnswers())
    probed: Outcome[dict[str, Probed]] = done["checks"]
    wanted = (*question.checks, *([readiness.PROBE.check] if question.gpus else []))
    answers: dict[str, Mapping[str, Probed]] = {
        check: {name: each[check] for name, each in probed.ok.items()} for check in wanted
    }
    measured = {**dict.fromkeys(PORTS, talked.ports), **dict.fromkeys(CLOCK, talked.clock)} if several else {}
    answers |= {check: probed for check, probed in measured.items() if check not in question.inventory.checks.off}
    lost = {name: str(failure.error or failure.reason) for name, failure in probed.failed.items()}
    return GateAnswers(answers, _contents(question, talked), talked.ports, lost)


def _talk(question: Question, session: Session) -> TalkAnswers:
    """Ask the agents about content, clocks and ports."""
    script = talk_script(str(question.inventory.prefix), question.folder, _READING, question.paths)
    ports = [port for port in (question.inventory.train.port, question.link) if port]
    return talk(session, question.nodes, script, patience=_READING, ports=ports)


def _probe(question: Question, session: Session) -> Outcome[dict[str, Probed]]:
    """Run the probes of the checks."""

    def one(node: Node) -> dict[str, Probed]:
        plans = {
            each: replace(question.plan, limits=limits(each, question.inventory.checks)) for each in question.checks
        }
        probes = [probe_of(each, plan, node) for each, plan in plans.items()]
        script = compile_probes(
            [*probes, *([readiness.PROBE] if question.gpus else [])],
            token=secrets.token_hex(8),
            limit=math.ceil(_DEADLINE),
        )
        result = session.run(node, FROM_INPUT, stdin=script.text.encode(), deadline=_DEADLINE + _GRACE)
        with reading(node):
            return parse(script, result.out)

    return session.each(one, on=question.nodes)


def _contents(question: Question, talked: TalkAnswers) -> dict[str, dict[str, Content]]:
    """By path and node, the content; without an answer it counts as unreadable."""
    found = {node.name: readiness.parse_content(talked.content.get(node.name, "")) for node in question.nodes}
    silent = Content("unread", "the agent did not answer")
    return {path: {name: contents.get(path, silent) for name, contents in found.items()} for path in question.paths}


def _together(asked: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call several functions in threads. Raises the first exception, or ``InterruptedByUser`` on Ctrl-C."""
    done: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()

    def work(name: str, call: Callable[[], Any]) -> None:
        try:
            done.put((name, call(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the caller waits
            done.put((name, None, error))

    for name, call in asked.items():
        threading.Thread(target=work, args=(name, call), name=f"gate-{name}", daemon=True).start()
    found: dict[str, Any] = {}
    try:
        while len(found) < len(asked):
            name, value, error = done.get()
            if error is not None:
                raise error
            found[name] = value
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted", hint="run the same command again") from None
    return found


def _of_nodes(answers: Mapping[str, Probed], nodes: Sequence[Node]) -> dict[str, Probed]:
    """The answers of these nodes."""
    return {node.name: answers[node.name] for node in nodes if node.name in answers}


def _key_of_path(files: RunFiles | None, path: str) -> str:
    """The configuration's key for a path; empty if it does not name the path."""
    settings = files.settings if files else {}
    return next((key for key, value in settings.items() if isinstance(value, str) and path in value.split(",")), "")


def _ranked(answer: Answer, rank: int) -> Answer:
    return answer if answer.facts.rank == rank else replace(answer, facts=replace(answer.facts, rank=rank))


# --- the nodes' preparation -----------------------------------------------------------------------


class RefusedError(ClusterctlError):
    """A node answered and cannot take part. ``created``: it created the run's folder."""

    def __init__(self, message: str, *, created: bool = False) -> None:
        super().__init__(message)
        self.created = created


def prepare(
    session: Session,
    nodes: Sequence[Node],
    run: str,
    files: RunFiles | None,
    *,
    port: int | None = None,
    scratch: str = "",
) -> Outcome[Answer]:
    """Send the run's folder to every node and ask its agent for facts, in one round trip.

    Args:
        session: the command's session.
        nodes: in the order of their ranks.
        run: its id.
        files: the files to send; None if the nodes have the run's folder.
        port: the requested MASTER_PORT; None: any free one.
        scratch: the temporary folder of a dry run, which receives only the agent; empty for the run's folder.

    Raises:
        InterruptedByUser: Ctrl-C; the folders are removed again.
    """
    folder = scratch or str(run_folder(session.inventory, run))
    agent = sources("agent") if files is not None else {}
    digest = hashlib.sha256(repr(sorted(agent.items())).encode()).hexdigest()[:16]

    extra = agent if scratch else agent | {SCRIPT: status_script(session.inventory).encode("utf-8", "surrogateescape")}

    ranks = {node.name: rank for rank, node in enumerate(nodes)}

    def ask(node: Node) -> Answer:
        probe = ["--master", nodes[0].train_address, "--rank", str(ranks[node.name])]
        probe += [] if scratch else ["--folder", folder]
        probe += [] if port is None else ["--port", str(port)]
        script = render(
            "run/prepare.sh.j2",
            prefix=str(session.inventory.prefix),
            root=str(session.inventory.root),
            run=folder,
            node=node.name,
            probe=probe,
            sends=files is not None,
            scratch=bool(scratch),
            digest=digest,
        )
        if files is None:
            result = session.run(node, script, deadline=_PROBE_DEADLINE)
        else:
            sent = replace(files, texts={}, entries=()) if scratch else files
            remote = session.connections[node]
            result = remote.run(script, stdin=tar_stream(sent, extra), deadline=_PREPARE_DEADLINE)
        if result.rc != 0:
            why = result.err.strip() or f"the script ended with status {result.rc}"
            raise RefusedError(why, created="folder made" in result.out.splitlines())
        release, folder_is, answer = (*result.out.split("\n", 2), "", "")[:3]
        return Answer(release.removeprefix("release "), Facts.parse(answer), folder_is == "folder made")

    asked = _Asked(session, nodes)
    try:
        return session.work(
            "prepare", "Preparing nodes", asked.keep(ask), on=nodes, state=lambda answer: _state(answer.facts)
        )
    except (InterruptedByUser, KeyboardInterrupt):
        if files is not None:
            # On a node without an answer, the script ends with its connection and removes partial files.
            remove_folders(asked.outcome(), nodes, run, scratch=scratch)
        raise


class _Asked:
    """The answers so far: an interrupted command must know which nodes created the folder."""

    def __init__(self, session: Session, nodes: Sequence[Node]) -> None:
        self._session = session
        self._ok: dict[str, Answer] = {}
        self._failed: dict[str, Failure] = {}
        self._finished = {node.name: threading.Event() for node in nodes}

    def keep(self, ask: Callable[[Node], Answer]) -> Callable[[Node], Answer]:
        """Wrap ``ask`` to keep its answers."""

        def one(node: Node) -> Answer:
            try:
                self._ok[node.name] = answer = ask(node)
            except ClusterctlError as error:
                self._failed[node.name] = Failure.of(error, self._session.inventory, node)
                raise
            finally:
                self._finished[node.name].set()
            return answer

        return one

    def outcome(self) -> Outcome[Answer]:
        """The answers, after a short wait for nodes that may be creating the folder."""
        until = time.monotonic() + _ANSWERS
        for each in self._finished.values():
            each.wait(max(0.0, until - time.monotonic()))
        return Outcome(self._session, dict(self._ok), dict(self._failed))


def unreachable(asked: Outcome[Answer]) -> NodesFailedError | None:
    """The error for nodes that did not answer; None if all did."""
    silent = [name for name, failure in asked.failed.items() if not isinstance(failure.error, RefusedError)]
    if not silent:
        return None
    total = len(asked.ok) + len(asked.failed)
    return NodesFailedError(
        f"no answer from {len(silent)} of {total} nodes; nothing was started",
        reasons=asked.reasons,
        hint=asked.hint(asked.session.without(silent, total)),
        nothing_done=True,
    )


def remove_folders(asked: Outcome[Answer], nodes: Iterable[Node], run: str, *, scratch: str = "") -> None:
    """Remove the run's folder from the nodes that created it, because a run that does not start must leave nothing."""
    session = asked.session
    created = {name for name, answer in asked.ok.items() if answer.created}
    created |= {name for name, failure in asked.failed.items() if getattr(failure.error, "created", False)}
    script = f"rm -rf -- {quote(scratch or run_folder(session.inventory, run))}"
    owners = [node for node in nodes if node.name in created]
    session.each(lambda node: session.run(node, script, deadline=_REMOVE_DEADLINE), on=owners)


def _state(facts: Facts) -> str:
    """A short description of a prepared node."""
    gpus = f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else f"no GPU, {facts.cpus} cores"
    return f"{facts.interface or 'no interface'}, {gpus}"
