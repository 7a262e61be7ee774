"""What the gate asks of the nodes, all of it at once: probes of checks, and a talk with the agents."""

from __future__ import annotations

import math
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.checks import Answer, Plan
from provision.checks._choosing import limits
from provision.checks._probing import compile_probes, parse, probe_of
from provision.errors import ClusterctlError, InterruptedByUser
from provision.model import Inventory, Node
from provision.render import render
from provision.run.readiness import PROBE, Content, parse_content
from provision.script import FROM_INPUT
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks.gate_talk import Talked, talk

# The checks that predict a hang or a crash, without those that the agent's facts answer. On every node:
ALWAYS = ("fs.mount", "fs.readonly", "fs.stale", "fs.tmp", "env.noexec", "mem.shm", "lim.memlock", "net.loopback")
# where there are GPUs:
WITH_GPUS = (
    *("gpu.driver", "gpu.recovery", "gpu.ecc", "gpu.computemode", "gpu.fabric", "gpu.fm", "gpu.nodes", "gpu.used"),
    *("gpu.xid", "ib.state"),
)
# and where there are several nodes:
BETWEEN = ("env.vars", "net.docker0", "net.duplicate", "net.iface", "net.route")
PORTS = ("net.master", "net.ephemeral")
CLOCK = ("clock.skew",)

_DEADLINE = 15.0  # seconds for the probes of a node: what is not known by then is UNKNOWN
_GRACE = 10.0  # seconds more until the connection is given up
_READING = 2.0  # seconds in which a node reads its data and models
_AT_ONCE = 64  # nodes


@dataclass(frozen=True)
class Said:
    """What the nodes said.

    Attributes:
        answers: by check and by node; the measures' under the checks that read them.
        content: by path and by node.
        ports: the ports measure.
        lost: nodes whose connection broke, each with its reason.
    """

    answers: Mapping[str, Mapping[str, Answer]] = field(default_factory=dict)
    content: Mapping[str, Mapping[str, Content]] = field(default_factory=dict)
    ports: Mapping[str, Answer] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """What is to be asked.

    Attributes:
        inventory: the cluster, with the MASTER_PORT of this run as its ``train.port``.
        nodes: in the order of their ranks.
        folder: of the run, on the nodes.
        paths: absolute ones that must hold the same on every node.
        gpus: whether any node has some.
        link: the port of rank 0's agent; None where there is none.
    """

    inventory: Inventory
    nodes: tuple[Node, ...]
    folder: str
    paths: tuple[str, ...] = ()
    gpus: bool = False
    link: int | None = None

    @property
    def plan(self) -> Plan:
        """As checks know it."""
        return Plan(self.inventory, self.nodes, user=self.inventory.ssh.user or "")

    @property
    def checks(self) -> tuple[str, ...]:
        """Those whose probes are run, without what the inventory has switched off."""
        several = len(self.nodes) > 1
        wanted = (*ALWAYS, *(WITH_GPUS if self.gpus else ()), *(BETWEEN if several else ()))
        return tuple(each for each in wanted if each not in self.inventory.checks.off)


def ask(question: Question, connections: Connections) -> Said:
    """Ask all nodes everything.

    Raises:
        InterruptedByUser: Ctrl-C.
    """
    several = len(question.nodes) > 1
    asked: dict[str, Callable[[], Any]] = {"checks": lambda: _probe(question, connections)}
    if several or question.paths:
        asked["talk"] = lambda: _talk(question, connections)
    done = _together(asked)
    talked: Talked = done.get("talk", Talked())
    probed: dict[str, dict[str, Answer] | ClusterctlError] = done["checks"]
    lost = {name: str(said) for name, said in probed.items() if isinstance(said, ClusterctlError)}
    answers: dict[str, Mapping[str, Answer]] = {}
    for check in (*question.checks, *([PROBE.check] if question.gpus else [])):
        answers[check] = {name: said[check] for name, said in probed.items() if not isinstance(said, ClusterctlError)}
    measured = {**dict.fromkeys(PORTS, talked.ports), **dict.fromkeys(CLOCK, talked.clock)} if several else {}
    answers |= {check: said for check, said in measured.items() if check not in question.inventory.checks.off}
    return Said(answers, _contents(question, talked), talked.ports, lost)


def _talk(question: Question, connections: Connections) -> Talked:
    """What the agents say about content, clocks and ports."""
    train_port = question.inventory.train.port
    script = render(
        "run/talk.sh.j2",
        prefix=str(question.inventory.prefix),
        run=question.folder,
        patience=_READING,
        paths=question.paths,
    )
    return talk(
        question.nodes,
        connections,
        script,
        patience=_READING,
        ports=[port for port in (train_port, question.link) if port],
    )


def _probe(question: Question, connections: Connections) -> dict[str, dict[str, Answer] | ClusterctlError]:
    """By node, what the probes of the checks brought."""

    def one(node: Node) -> dict[str, Answer]:
        plans = {
            each: replace(question.plan, limits=limits(each, question.inventory.checks)) for each in question.checks
        }
        probes = [probe_of(each, plan, node) for each, plan in plans.items()]
        script = compile_probes(
            [*probes, *([PROBE] if question.gpus else [])], token=secrets.token_hex(8), limit=math.ceil(_DEADLINE)
        )
        result = connections[node].run(FROM_INPUT, stdin=[script.text.encode()], deadline=_DEADLINE + _GRACE)
        with reading(node):
            return parse(script, result.out)

    return fan_out(question.nodes, one, limit=_AT_ONCE)


def _contents(question: Question, talked: Talked) -> dict[str, dict[str, Content]]:
    """By path and node, what lies there; a node that gave no answer has one that cannot be read."""
    found = {node.name: parse_content(talked.content.get(node.name, "")) for node in question.nodes}
    silent = Content("unread", "the agent gave no answer")
    return {path: {name: said.get(path, silent) for name, said in found.items()} for path in question.paths}


def _together(asked: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Do several things at once; what one of them raises is raised here, and Ctrl-C at once."""
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


def of(answers: Mapping[str, Answer], nodes: Sequence[Node]) -> dict[str, Answer]:
    """The answers of these nodes."""
    return {node.name: answers[node.name] for node in nodes if node.name in answers}
