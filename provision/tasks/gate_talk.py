"""The gate's talk with the agents of all nodes: content, clocks and ports over one connection to each.

What comes back has the lines of ``tasks/measures``, so that the checks of clocks and ports judge it as theirs. The
measures themselves would open four connections to a node, which for sixteen nodes takes longer than all they ask.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from provision.checks import Answer
from provision.checks.kit.measures import line as clock_line
from provision.checks.kit.measures import pairs
from provision.errors import ClusterctlError
from provision.model import Node
from provision.ssh.remote import Connections, DeadlineExceeded, fan_out
from provision.tasks.measures.clock import SAMPLES, Bounds, bounds, combined

TIMEOUT = 4  # seconds for a connection: its first packet is sent again after 1 and 3
RANDOM = 2  # random ports on each node
_ANSWER = 10.0  # seconds for an answer, beyond what its question takes
_GONE = 5.0  # seconds until an agent without input is given up
_LIFE = 60.0  # seconds that a talk lasts at most


@dataclass(frozen=True)
class Talked:
    """What the nodes said, by node: the agent's line about content, and answers for the checks."""

    content: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, Answer] = field(default_factory=dict)
    clock: Mapping[str, Answer] = field(default_factory=dict)


def talk(
    nodes: Sequence[Node], connections: Connections, script: str, *, patience: float, ports: Sequence[int]
) -> Talked:
    """Ask all nodes.

    Args:
        nodes: the first is rank 0.
        connections: to them.
        script: starts the agent's talk.
        patience: seconds that it may read before it answers.
        ports: of rank 0, the MASTER_PORT and that of its agent's link; with one node they are not tried.
    """
    talks = {node.name: _Talk(node, connections, script, patience) for node in nodes}
    try:
        for each in talks.values():
            each.start()
        if len(nodes) == 1:
            each = next(iter(talks.values()))
            each.until("content ", patience)
            return Talked({name: one.content for name, one in talks.items()})
        token = secrets.token_hex(8)
        base = time.time() - time.monotonic()  # the controller's own clock may be set meanwhile
        found = fan_out(nodes, lambda node: _first(talks[node.name], node, nodes, token, ports, base), limit=len(nodes))
        fan_out(nodes, lambda node: _second(talks[node.name], node, talks, nodes), limit=len(nodes))
    finally:
        for each in talks.values():
            each.close()
        for each in talks.values():
            with suppress(RuntimeError):  # never started
                each.join(_GONE)  # its ports are free again
    return Talked(
        {name: one.content for name, one in talks.items()},
        {name: one.answer() for name, one in talks.items()},
        {name: one if isinstance(one, Answer) else talks[name].answer() for name, one in found.items()},
    )


def _first(each: _Talk, node: Node, nodes: Sequence[Node], token: str, ports: Sequence[int], base: float) -> Answer:
    """Let the agent listen, and compare its clock."""
    wanted = [*(ports if node == nodes[0] else ()), *[0] * RANDOM]
    each.say(f"listen {token} {node.name} {node.train_address} {' '.join(map(str, wanted))}")
    if not each.until("ready", each.patience):
        return each.answer()
    samples: list[Bounds] = []
    for _ in range(SAMPLES):
        sent = base + time.monotonic()
        each.say("time")
        said = each.until("time ")
        if said is None:
            break
        if one := bounds(said.removeprefix("time "), sent, base + each.heard):
            samples.append(one[0])
    offset = combined(samples)
    return (
        Answer(clock_line(offset, len(samples), whole_seconds=False))
        if offset
        else Answer(err="the agent gave no time")
    )


def _second(each: _Talk, node: Node, talks: Mapping[str, _Talk], nodes: Sequence[Node]) -> None:
    """Let the agent connect to the others."""
    targets = [
        f"{other.name} {kind} {other.train_address} {port}"
        for one, other in pairs(nodes)
        if one == node
        for kind, port in talks[other.name].listens
    ]
    each.say(f"connect {TIMEOUT} {' '.join(targets)}")
    each.until("done", TIMEOUT)


class _Talk(threading.Thread):
    """One node's agent: lines go to it, and its lines come."""

    def __init__(self, node: Node, connections: Connections, script: str, patience: float) -> None:
        super().__init__(name=f"talk-{node.name}", daemon=True)
        self.content = ""
        self.heard = 0.0  # monotonic: when the line came that ``until`` has returned
        self.patience = patience
        self._node, self._connections, self._script = node, connections, script
        self._lines: list[str] = []
        self._came: queue.SimpleQueue[tuple[str | None, float]] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._failure: ClusterctlError | None = None
        self._said_last = ""

    def run(self) -> None:
        """Talk until ``close``."""
        try:
            result = self._connections[self._node].run(
                self._script, stdin=self._input(), on_line=self._take, deadline=_LIFE
            )
            self._said_last = result.err
        except ClusterctlError as error:
            self._failure = error
        finally:
            self._came.put((None, time.monotonic()))

    def say(self, text: str) -> None:
        """Send a line."""
        self._out.put(text)

    def until(self, start: str, more: float = 0.0) -> str | None:
        """Wait for a line that begins so, for as long as it may take and ``more`` seconds; None when none comes."""
        limit = time.monotonic() + _ANSWER + more
        while (left := limit - time.monotonic()) > 0:
            try:
                text, at = self._came.get(timeout=left)
            except queue.Empty:
                return None
            if text is None:
                self._came.put((None, at))  # for whoever waits next
                return None
            if text.startswith(start):
                self.heard = at
                return text
        return None

    def close(self) -> None:
        """End its input, and with it the agent and what it listens on."""
        self._out.put(None)

    @property
    def listens(self) -> list[tuple[str, str]]:
        """Where it listens, kind and port."""
        said = (text.split() for text in self._lines if text.startswith("listen "))
        return [(words[1], words[2]) for words in said if words[3:] == ["open"]]

    def answer(self) -> Answer:
        """All that it has said about ports, as the measure would have it."""
        if isinstance(self._failure, DeadlineExceeded):
            return Answer(state="hung")
        if self._failure is not None:
            return Answer(rc=1, err=str(self._failure))
        return Answer("".join(f"{text}\n" for text in self._lines), err=self._said_last[-500:])

    def _input(self) -> Iterator[bytes]:
        while (text := self._out.get()) is not None:
            yield f"{text}\n".encode()

    def _take(self, text: str) -> None:
        at = time.monotonic()
        if text.startswith("content "):
            self.content = text.removeprefix("content ")
        elif not text.startswith(("time ", "ready", "done")):
            self._lines.append(text)
        self._came.put((text, at))
