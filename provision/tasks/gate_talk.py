"""The gate's talk with the agents of all nodes: content, clocks and ports over one connection to each.

The answers have the lines of ``tasks/measures``, so that the checks of clocks and ports judge them. The measures
themselves would open four connections to a node, which for sixteen nodes takes longer than all the questions.
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
from provision.session import Conversation, run_conversations
from provision.ssh.remote import DeadlineExceeded
from provision.tasks.measures.clock import SAMPLES, Bounds, bounds, combined

if TYPE_CHECKING:
    from provision.session import Session

TIMEOUT = 4  # seconds for a connection: its first packet is sent again after 1 and 3
RANDOM = 2  # random ports on each node
_ANSWER = 10.0  # seconds for an answer, beyond what its question takes
_GONE = 5.0  # seconds for an agent without input to exit and free its ports
_LIFE = 60.0  # seconds that a talk lasts at most
_OTHER = ("content ", "time ", "ready", "done")  # lines that are not about ports


@dataclass(frozen=True)
class Talked:
    """What the agents said, by node: the line about content, and answers for the checks."""

    content: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, Answer] = field(default_factory=dict)
    clock: Mapping[str, Answer] = field(default_factory=dict)


def talk(session: Session, nodes: Sequence[Node], script: str, *, patience: float, ports: Sequence[int]) -> Talked:
    """Ask all agents.

    Args:
        session: the command's session.
        nodes: the first is rank 0.
        script: starts the agent's talk.
        patience: seconds that the agent may read before it answers.
        ports: of rank 0, the MASTER_PORT and that of its agent's link; with one node they are not tried.
    """
    connect = session.connections.__getitem__
    talks = {node.name: Conversation(node, connect, script, deadline=_LIFE) for node in nodes}
    clock: Mapping[str, Answer] = {}
    with run_conversations(talks.values(), patience=_GONE):
        if len(nodes) == 1:
            talks[nodes[0].name].wait_for("content ", _ANSWER + patience)
        else:
            token = secrets.token_hex(8)
            base = time.time() - time.monotonic()  # the controller's own clock may be set meanwhile

            def first(node: Node) -> Answer:
                _listen(talks[node.name], nodes, token, ports)
                return _clock(talks[node.name], base, patience)

            clock = session.each(first, on=nodes, limit=len(nodes)).ok
            session.each(lambda node: _connect(talks[node.name], talks, nodes), on=nodes, limit=len(nodes))
    contents = {
        name: next((text for text in one.lines if text.startswith("content ")), "") for name, one in talks.items()
    }
    return Talked(
        {name: text.removeprefix("content ") for name, text in contents.items()},
        {name: _answer(one) for name, one in talks.items()} if clock else {},
        clock,
    )


def _listen(each: Conversation, nodes: Sequence[Node], token: str, ports: Sequence[int]) -> None:
    """Let the agent listen."""
    wanted = [*(ports if each.node == nodes[0] else ()), *[0] * RANDOM]
    each.send(f"listen {token} {each.node.name} {each.node.train_address} {' '.join(map(str, wanted))}")


def _clock(each: Conversation, base: float, patience: float) -> Answer:
    """Compare the clock of an agent that listens."""
    if not each.wait_for("ready", _ANSWER + patience):
        return _answer(each)
    samples: list[Bounds] = []
    for _ in range(SAMPLES):
        sent = base + time.monotonic()
        each.send("time")
        said = each.wait_for("time ", _ANSWER)
        if said is None:
            break
        if one := bounds(said.removeprefix("time "), sent, base + each.heard):
            samples.append(one[0])
    offset = combined(samples)
    if offset is None:
        return Answer(err="the agent gave no time")
    return Answer(clock_line(offset, len(samples), whole_seconds=False))


def _connect(each: Conversation, talks: Mapping[str, Conversation], nodes: Sequence[Node]) -> None:
    """Let the agent connect to the others."""
    targets = [
        f"{other.name} {kind} {other.train_address} {port}"
        for one, other in pairs(nodes)
        if one == each.node
        for kind, port in _open_ports(talks[other.name])
    ]
    each.send(f"connect {TIMEOUT} {' '.join(targets)}")
    each.wait_for("done", _ANSWER + TIMEOUT)


def _open_ports(each: Conversation) -> list[tuple[str, str]]:
    """Where an agent listens, kind and port."""
    said = (text.split() for text in list(each.lines) if text.startswith("listen "))
    return [(words[1], words[2]) for words in said if words[3:] == ["open"]]


def _answer(each: Conversation) -> Answer:
    """All that an agent said about ports, as the measure would have it."""
    if isinstance(each.failure, DeadlineExceeded):
        return Answer(state="hung")
    if each.failure is not None:
        return Answer(rc=1, err=str(each.failure))
    lines = "".join(f"{text}\n" for text in each.lines if not text.startswith(_OTHER))
    return Answer(lines, err=each.result.err[-500:] if each.result else "")
