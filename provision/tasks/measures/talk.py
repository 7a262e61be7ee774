"""The gate's measures: content, clocks and ports over one connection to each node, in a talk with its agent.

The answers have the lines of the other measures, so that the checks of clocks and ports judge them. The other measures
would open four connections to a node, which takes longer than all questions on sixteen nodes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.checks import Answer
from provision.checks.kit.measures import line as clock_line
from provision.checks.kit.measures import pairs
from provision.model import Node
from provision.render import quote, words
from provision.session import Conversation, run_conversations
from provision.tasks.measures.clock import SAMPLES, Bounds, bounds, broken, combined
from provision.tasks.measures.ports import RANDOM, TIMEOUT, open_ports

if TYPE_CHECKING:
    from provision.session import Session

_ANSWER = 10.0  # seconds for an answer, beyond what its question takes
_GONE = 5.0  # seconds for an agent without input to exit and free its ports
_LIFE = 60.0  # seconds that a talk lasts at most
_OTHER = ("content ", "time ", "ready", "done")  # lines that are not about ports


@dataclass(frozen=True)
class TalkAnswers:
    """The agents' answers by node: the line about content, and answers for the checks."""

    content: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, Answer] = field(default_factory=dict)
    clock: Mapping[str, Answer] = field(default_factory=dict)


def talk_script(prefix: str, run: str, patience: float, paths: Sequence[str]) -> str:
    """Sh with which the agent answers the lines of stdin, until stdin ends."""
    return f"exec {quote(prefix)}/bin/python -I {quote(run)}/agent talk --patience {patience} -- {words(paths)}\n"


def talk(session: Session, nodes: Sequence[Node], script: str, *, patience: float, ports: Sequence[int]) -> TalkAnswers:
    """Ask all agents.

    Args:
        session: the command's session.
        nodes: the first is rank 0.
        script: starts the agent's talk.
        patience: seconds that the agent may read before it answers.
        ports: MASTER_PORT and the link's port on rank 0; not tried with one node.
    """
    connect = session.connections.__getitem__
    talks = {node.name: Conversation(node, connect, script, deadline=_LIFE) for node in nodes}
    clock: Mapping[str, Answer] = {}
    with run_conversations(talks.values(), patience=_GONE):
        if len(nodes) == 1:
            talks[nodes[0].name].wait_for("content ", _ANSWER + patience)
        else:
            token = secrets.token_hex(8)
            base = time.time() - time.monotonic()  # the controller's clock may be set during the talk

            def first(node: Node) -> Answer:
                _listen(talks[node.name], nodes, token, ports)
                return _measure_clock(talks[node.name], base, patience)

            clock = session.each(first, on=nodes, limit=len(nodes)).ok
            session.each(lambda node: _connect(talks[node.name], talks, nodes), on=nodes, limit=len(nodes))
    contents = {
        name: next((text for text in one.lines if text.startswith("content ")), "") for name, one in talks.items()
    }
    return TalkAnswers(
        {name: text.removeprefix("content ") for name, text in contents.items()},
        {name: _answer(one) for name, one in talks.items()} if clock else {},
        clock,
    )


def _listen(each: Conversation, nodes: Sequence[Node], token: str, ports: Sequence[int]) -> None:
    """Ask the agent to listen."""
    wanted = [*(ports if each.node == nodes[0] else ()), *[0] * RANDOM]
    each.send(f"listen {token} {each.node.name} {each.node.train_address} {' '.join(map(str, wanted))}")


def _measure_clock(each: Conversation, base: float, patience: float) -> Answer:
    """Compare the clock of an agent that listens."""
    if not each.wait_for("ready", _ANSWER + patience):
        return _answer(each)
    samples: list[Bounds] = []
    for _ in range(SAMPLES):
        sent = base + time.monotonic()
        each.send("time")
        reply = each.wait_for("time ", _ANSWER)
        if reply is None:
            break
        if one := bounds(reply.removeprefix("time "), sent, base + each.received_at):
            samples.append(one[0])
    offset = combined(samples)
    if offset is None:
        return Answer(err="the agent did not report its time")
    return Answer(clock_line(offset, len(samples), whole_seconds=False))


def _connect(each: Conversation, talks: Mapping[str, Conversation], nodes: Sequence[Node]) -> None:
    """Ask the agent to connect to the others."""
    targets = [
        f"{other.name} {kind} {other.train_address} {port}"
        for one, other in pairs(nodes)
        if one == each.node
        for kind, found in open_ports(list(talks[other.name].lines)).items()
        for port in found
    ]
    each.send(f"connect {TIMEOUT} {' '.join(targets)}")
    each.wait_for("done", _ANSWER + TIMEOUT)


def _answer(each: Conversation) -> Answer:
    """An agent's answer about ports, in the format of the measure."""
    if each.failure is not None:
        return broken(each.failure)
    lines = "".join(f"{text}\n" for text in each.lines if not text.startswith(_OTHER))
    return Answer(lines, err=each.result.err[-500:] if each.result else "")
