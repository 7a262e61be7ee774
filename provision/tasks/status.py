"""``clusterctl status``: all nodes and runs at one moment.

Every node is asked by one script and for its clock. Of many nodes, a run's agents are asked first: one of them asks all
the others, which run the same script (``trainer/agent/statuses.py``). The nodes that do not answer this way are asked
directly, so nothing depends on it.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from provision.checks import Plan, limits
from provision.checks.kit.measures import Offset, offset
from provision.env.text import number
from provision.errors import ClusterctlError
from provision.model import Inventory, Node
from provision.render import quote, render
from provision.run import fields, plan_name, record
from provision.run.found import NodeRuns, Part, Run, merge_runs, parse_runs
from provision.ssh.remote import reading
from provision.tasks.measures import clock
from provision.tasks.runs import list_script, listed_runs, run_folder
from trainer.agent.contract.statuses import LARGEST, PATIENCE
from trainer.agent.contract.untrusted import finite

if TYPE_CHECKING:
    from provision.session import Outcome, Session

DIRECT = 32  # nodes up to which all are asked directly
_FIRST = 3  # nodes that are asked for a run whose agents can be asked
_DEADLINE = 30.0
_RECORDS = 20  # the newest runs of this machine

# The prefix is a link to releases/NAME. It is read as text, because accessing its target may hang.
_SCRIPT = """\
read -r uptime _ </proc/uptime && echo "uptime $uptime"
echo "current $(readlink -- {prefix})"
"""

Answer = tuple["NodeStatus", NodeRuns]


@dataclass(frozen=True)
class NodeStatus:
    """A node that answered.

    Attributes:
        uptime: seconds since it booted; None if it does not say.
        release: the current release; empty if there is none.
    """

    uptime: float | None = None
    release: str = ""


@dataclass(frozen=True)
class Status:
    """All nodes at one moment.

    Attributes:
        nodes: the nodes that answered, by name.
        unreachable: the others, each with its reason.
        offsets: of the nodes' clocks from the controller's.
        apart: how far apart clocks may be, in seconds: ``skew_ms`` of the check clock.skew.
        runs: by id, the oldest first.
        users: by node name, the uid that the inventory logs in as.
    """

    nodes: Mapping[str, NodeStatus]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    apart: float = 0.05
    runs: Mapping[str, Run] = field(default_factory=dict)
    users: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """What the agents of a run told about their nodes.

    Attributes:
        by: the node whose agent asked the others.
        answers: by node name.
        offsets: by node name, of its clock from that of ``by``.
    """

    by: Node
    answers: Mapping[str, Answer]
    offsets: Mapping[str, Offset]


def status_script(inventory: Inventory, nodes: int | None = None) -> str:
    """The script that tells a node's status, one of ``nodes`` nodes; None: of the inventory's.

    A run has it as a file, for its agent.
    """
    count = len(inventory.nodes) if nodes is None else nodes
    return _SCRIPT.format(prefix=quote(inventory.prefix)) + list_script(inventory, most=listed_runs(count))


def status(session: Session, *, direct: int = DIRECT) -> Status:
    """Ask every node. Changes nothing.

    Args:
        session: the command's session.
        direct: up to so many nodes are all asked directly.
    """
    inventory, names = session.inventory, [node.name for node in session.inventory.nodes]
    script = status_script(inventory, len(session.nodes))

    def read(node: Node, out: str) -> Answer:
        return read_status(out), parse_runs(node.name, out, names)

    told = _ask_agents(session, script, read) if len(session.nodes) > direct else None
    heard = dict(told.answers) if told else {}
    rest = [node for node in session.nodes if node.name not in heard]
    outcome: Outcome[Answer] = session.ask(
        "status", f"Asking {number(len(rest), 'node')}", script, read, on=rest, deadline=_DEADLINE
    )
    answers = {node.name: found for node in session.nodes if (found := (heard | dict(outcome.ok)).get(node.name))}
    return Status(
        nodes={name: answer for name, (answer, _) in answers.items()},
        unreachable=outcome.reasons,
        offsets=_offsets(session, outcome.of(session.nodes), told),
        apart=limits("clock.skew", inventory.checks)["skew_ms"] / 1e3,
        runs=merge_runs(found for _, found in answers.values()),
        users={name: found.uid for name, (_, found) in answers.items()},
    )


def read_status(out: str) -> NodeStatus:
    """A node's answer to ``status``."""
    uptime = re.search(r"^uptime ([0-9]{1,12}(?:\.[0-9]{1,6})?)$", out, re.MULTILINE)
    current = re.search(r"^current (?:.*/)?releases/([^/\n]+)/?$", out, re.MULTILINE)
    return NodeStatus(float(uptime[1]) if uptime else None, current[1] if current else "")


def read_answer(line: str) -> tuple[str, str, Offset | None] | None:
    """One line of ``agent statuses``: the node, its script's output, and its clock. None if it is not an answer.

    The question was sent before it was taken, so the node's clock is ahead by at most the difference of these times;
    the answer was given before it was received, so it is ahead by at least the difference of those.
    """
    content = fields.read(line)
    if content is None or not isinstance(content.get("node"), str) or not isinstance(content.get("out"), str):
        return None
    try:
        unpacked = zlib.decompressobj()
        out = unpacked.decompress(base64.b64decode(content["out"], validate=True), LARGEST)
    except (binascii.Error, ValueError, zlib.error):
        return None
    if not unpacked.eof:  # it is longer than an agent sends, or cut off
        return None
    return content["node"], out.decode("utf-8", "replace"), _clock(content)


def _clock(content: Mapping[str, Any]) -> Offset | None:
    times = [content.get(key) for key in ("sent", "taken", "given", "received")]
    if not all((finite(each, 1e11) or 0.0) > 0 for each in times):
        return None
    sent, taken, given, received = map(float, times)  # type: ignore[arg-type] # checked above
    low, high = given - received, taken - sent
    return Offset((low + high) / 2, (high - low) / 2) if low <= high else None


def _ask_agents(session: Session, script: str, read: Callable[[Node, str], Answer]) -> Told | None:
    """Ask the agents of the largest run that one of a few nodes has; None if there is none."""

    def first(node: Node) -> Answer:
        out = session.run(node, script, deadline=_DEADLINE).out
        with reading(node):
            return read(node, out)

    # One after the other would cost a timeout for each node that is down.
    found = session.each(first, on=_likely(session))
    candidates = [
        (part.number("nnodes") or 0.0, part.run, node, part)
        for node in session.nodes
        if node.name in found.ok
        for part in found.ok[node.name][1].parts
        if part.node == node.name and part.live and part.fields.get("uid") == found.ok[node.name][1].uid
    ]
    if not candidates:
        return None
    _, run, node, part = max(candidates, key=lambda each: each[:2])
    with session.stage("agents", f"Asking the agents of {run}") as shown:
        told = _listen(session, node, part, read)
        shown.states = {node.name: f"{len(told.answers)} answers"} if told.answers else {}
    return told


def _likely(session: Session) -> Sequence[Node]:
    """The nodes that probably have an agent: the first of this machine's newest run, else of the inventory."""
    here = {node.name: node for node in session.nodes}
    runs = reversed(record.kept(session.inventory.path, newest=_RECORDS).values())
    members = next((each["nodes"] for each in runs if each.get("state") == "running" and each.get("nodes")), ())
    named = [here[name] for name in members if isinstance(name, str) and name in here]
    return (named or list(session.nodes))[:_FIRST]


def _listen(session: Session, node: Node, part: Part, read: Callable[[Node, str], Answer]) -> Told:
    """The answers of a run's agents, from the one on a node."""
    folder = run_folder(session.inventory, part.run)
    arguments = ["-IS", f"{folder}/agent", "statuses", f"{folder}/{plan_name(part.position)}", "--patience", PATIENCE]
    nodes = {each.name: each for each in session.nodes}
    answers: dict[str, Answer] = {}
    offsets: dict[str, Offset] = {}

    def take(line: str) -> None:
        answer = read_answer(line)
        about = nodes.get(answer[0]) if answer else None
        if answer is None or about is None or about.name in answers:
            return
        with reading(about):
            answers[about.name] = read(about, answer[1])
        if answer[2]:
            offsets[about.name] = answer[2]

    script = render("run/agent_python.sh.j2", run=str(folder), arguments=arguments)
    try:
        session.connections[node].run(script, on_line=take, deadline=_DEADLINE)
    except ClusterctlError:  # the others are asked directly, and this node as well if its answer is missing
        return Told(node, answers, offsets)
    return Told(node, answers, offsets)


def _offsets(session: Session, there: Sequence[Node], told: Told | None) -> dict[str, Offset]:
    """The clocks' offsets: measured, and of the agents' nodes computed from the measured one of the asked node."""
    asked = [*there, *([told.by] if told and told.answers and told.by not in there else [])]
    clocks = clock.measure(Plan(session.inventory, tuple(asked)), session) if asked else {}
    found = {name: one for name, answer in clocks.items() if (one := offset(answer))}
    base = found.get(told.by.name) if told else None
    if told and base:
        for name, ahead in told.offsets.items():
            found.setdefault(name, Offset(ahead.seconds + base.seconds, ahead.error + base.error))
    return {node.name: found[node.name] for node in session.nodes if node.name in found}
