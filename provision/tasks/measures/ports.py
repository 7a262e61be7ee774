"""Measures which nodes can connect to which, on MASTER_PORT and on random ports.

Every node first starts listeners; then all nodes connect to all listeners at once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan
from provision.checks.kit.measures import pairs
from provision.checks.net_ports import DEFAULT
from provision.model import Node, Result
from provision.render import render, words
from provision.session import Conversation, run_conversations
from provision.tasks.measures.clock import broken

if TYPE_CHECKING:
    from provision.session import Session

TIMEOUT = 4  # seconds for a connection: its first packet is sent again after 1 and 3
RANDOM = 2  # random ports on each node
_READY = 10.0  # seconds for a listener to report its port
_LIFE = 60  # seconds after which a listener exits, even if its connection stays
_BEAT = 1.0
_PORT = re.compile(r"[0-9]{1,5}")


def measure(plan: Plan, session: Session) -> dict[str, Answer]:
    """Every node's answer about its ports and the other nodes' ports; an unreachable node's answer has the reason.

    Takes two round trips: all listeners, then all connections. A listener exits with its connection.
    """
    token = secrets.token_hex(8)
    connect = session.connections.__getitem__
    listeners = {
        node.name: Conversation(node, connect, listen_script(plan, node, token), deadline=_LIFE + _READY, beat=_BEAT)
        for node in plan.nodes
    }
    with run_conversations(listeners.values(), patience=5.0):
        until = time.monotonic() + _READY
        for listener in listeners.values():
            listener.wait_for("ready", max(0.0, until - time.monotonic()))
        outcome = session.work(
            "ports",
            "Trying the nodes' ports",
            lambda node: session.run(node, _connect(plan, node, listeners, token), deadline=TIMEOUT + _READY),
            on=plan.nodes,
            state=lambda _: "done",
        )
    answers = {name: _answer(listeners[name], result) for name, result in outcome.ok.items()}
    return answers | {name: broken(failure.error) for name, failure in outcome.failed.items()}


def open_ports(lines: Iterable[str]) -> dict[str, list[int]]:
    """A listener's ports by kind, from its output."""
    found: dict[str, list[int]] = {}
    for line in lines:
        if (fields := line.split())[:1] == ["listen"] and fields[3:] == ["open"] and _PORT.fullmatch(fields[2]):
            found.setdefault(fields[1], []).append(int(fields[2]))
    return found


def listen_script(plan: Plan, node: Node, token: str) -> str:
    """Sh that listens on the ports of a node."""
    port = plan.inventory.train.port or DEFAULT
    wanted = [*([port] if node == plan.nodes[0] else []), *[0] * RANDOM]
    return _script(plan, "listen", token, (node.name, node.train_address, _LIFE, *wanted))


def _connect(plan: Plan, node: Node, listeners: Mapping[str, Conversation], token: str) -> str:
    master, port = plan.nodes[0], plan.inventory.train.port or DEFAULT
    wanted: list[str | int] = []
    for one, other in pairs(plan.nodes):
        if one != node or listeners[other.name].failure is not None:
            continue
        if other == master:
            wanted += [other.name, "master", other.train_address, port]
        for random in open_ports(_reports(listeners[other.name])).get("random", ()):
            wanted += [other.name, "random", other.train_address, random]
    script = _script(plan, "connect", token, (TIMEOUT, *wanted))
    busy = node == master and any(
        line.startswith(f"listen master {port} busy") for line in _reports(listeners[node.name])
    )
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


def _reports(listener: Conversation) -> list[str]:
    """A listener's lines about its ports, or the reason why it does not listen."""
    lines = [text.strip() for text in list(listener.lines) if text.strip()]
    if "ready" not in lines and listener.result is not None:
        lines.append(f"problem {' '.join(listener.result.err.split()) or 'the listener exited at once'}")
    return [text for text in lines if text != "ready"]


def _answer(listener: Conversation, result: Result) -> Answer:
    lines = [*_reports(listener), *(line for line in result.out.splitlines() if not line.startswith("tool "))]
    return Answer("\n".join(lines) + "\n", result.rc, err=result.err[-500:])
