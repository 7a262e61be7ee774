"""Which node reaches which, on MASTER_PORT and on random ports: a listener on each, then all connections at once."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan
from provision.checks.kit.measures import pairs
from provision.checks.net_ports import DEFAULT
from provision.errors import ClusterctlError
from provision.model import Emit, Node, Result, StageFinished, StageStarted
from provision.render import render, words
from provision.ssh.remote import DeadlineExceeded, fan_out

if TYPE_CHECKING:
    from provision.ssh.remote import Connections

TIMEOUT = 4  # seconds for a connection: its first packet is sent again after 1 and 3
RANDOM = 2  # random ports on each node
_READY = 10.0  # seconds until a listener must have said where it listens
_LIFE = 60  # seconds that a listener lives at most, whatever becomes of its connection
_BEAT = 1.0
_PORT = re.compile(r"[0-9]{1,5}")


class Ear(threading.Thread):
    """Runs the listener of one node, and keeps what it says. ``let_go`` ends it."""

    def __init__(self, node: Node, connections: Connections, script: str) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.lines: list[str] = []
        self.failure: ClusterctlError | None = None
        self.answered = threading.Event()
        self._connections = connections
        self._script = script
        self._let_go = threading.Event()

    def run(self) -> None:
        """Listen until ``let_go``."""
        try:
            result = self._connections[self.node].run(
                self._script, stdin=self._held_open(), on_line=self._hear, deadline=_LIFE + _READY
            )
            if not self.answered.is_set():
                self.lines.append(f"problem {' '.join(result.err.split()) or 'the listener ended at once'}")
        except ClusterctlError as error:
            self.failure = error
        finally:
            self.answered.set()

    def let_go(self) -> None:
        """End the listener's input, and with it the listener."""
        self._let_go.set()

    @property
    def ports(self) -> dict[str, list[int]]:
        """Where it listens, by kind."""
        found: dict[str, list[int]] = {}
        for line in self.lines:
            if (said := line.split())[:1] == ["listen"] and said[3:] == ["open"] and _PORT.fullmatch(said[2]):
                found.setdefault(said[1], []).append(int(said[2]))
        return found

    def _held_open(self) -> Iterator[bytes]:
        while not self._let_go.wait(_BEAT):
            yield b"\n"

    def _hear(self, line: str) -> None:
        if line == "ready":
            self.answered.set()
        elif line.strip():
            self.lines.append(line.strip())


def measure(plan: Plan, connections: Connections, emit: Emit) -> dict[str, Answer]:
    """What every node says about its ports and those of others; an unreachable one says why.

    Two round trips: all listeners, then all connections. Nothing stays on a node: a listener ends with its connection.
    """
    began = time.monotonic()
    emit(StageStarted("ports", "Trying the nodes' ports", len(plan.nodes)))
    token = secrets.token_hex(8)
    ears = {node.name: Ear(node, connections, _listen(plan, node, token)) for node in plan.nodes}
    try:
        for ear in ears.values():
            ear.start()
        until = time.monotonic() + _READY
        for ear in ears.values():
            ear.answered.wait(max(0.0, until - time.monotonic()))
        said = fan_out(
            plan.nodes,
            lambda node: connections[node].run(_connect(plan, node, ears, token), deadline=TIMEOUT + _READY),
            limit=64,
        )
    finally:
        for ear in ears.values():
            ear.let_go()
        for ear in ears.values():
            with suppress(RuntimeError):  # never started
                ear.join(5)
    states = {name: "unreachable" if isinstance(result, ClusterctlError) else "done" for name, result in said.items()}
    emit(StageFinished("ports", time.monotonic() - began, states))
    return {name: _answer(ears[name], result) for name, result in said.items()}


def _listen(plan: Plan, node: Node, token: str) -> str:
    port = plan.inventory.train.port or DEFAULT
    wanted = [*([port] if node == plan.nodes[0] else []), *[0] * RANDOM]
    return _script(plan, "listen", token, (node.name, node.train_address, _LIFE, *wanted))


def _connect(plan: Plan, node: Node, ears: Mapping[str, Ear], token: str) -> str:
    master, port = plan.nodes[0], plan.inventory.train.port or DEFAULT
    wanted: list[str | int] = []
    for one, other in pairs(plan.nodes):
        if one != node or ears[other.name].failure is not None:
            continue
        if other == master:
            wanted += [other.name, "master", other.train_address, port]
        for random in ears[other.name].ports.get("random", ()):
            wanted += [other.name, "random", other.train_address, random]
    script = _script(plan, "connect", token, (TIMEOUT, *wanted))
    busy = node == master and any(line.startswith(f"listen master {port} busy") for line in ears[node.name].lines)
    return f"(\n{render('measures/owner.sh.j2', port=port)})\n{script}" if busy else script


def _script(plan: Plan, mode: str, token: str, arguments: Sequence[str | int]) -> str:
    return render(
        "measures/ports.sh.j2",
        mode=mode,
        token=token,
        words=words(arguments),
        life=_LIFE,
        perl=render("measures/ports.pl"),
        program=render("measures/ports.py"),
        python=plan.inventory.prefix / "bin/python",
    )


def _answer(ear: Ear, result: Result | ClusterctlError) -> Answer:
    if isinstance(result, DeadlineExceeded):
        return Answer(state="hung")
    if isinstance(result, ClusterctlError):
        return Answer(rc=1, err=str(result))
    lines = [*ear.lines, *(line for line in result.out.splitlines() if not line.startswith("tool "))]
    return Answer("\n".join(lines) + "\n", result.rc, err=result.err[-500:])
