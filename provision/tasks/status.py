"""``clusterctl status``: what every node is doing at this moment, how far the clocks are apart, and the runs.

Runs are found on the nodes, so that any machine with the inventory sees them, whoever started them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.checks import Plan, limits
from provision.checks.kit.measures import Offset, offset
from provision.errors import ClusterctlError
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import quote
from provision.run.found import Run, Told, gathered, told
from provision.ssh.remote import Connections, fan_out, reading
from provision.tasks import runs
from provision.tasks.answers import reason
from provision.tasks.measures import clock

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

_STAGE = "status"
_AT_ONCE = 64  # nodes
_DEADLINE = 30.0

# The prefix is a link to releases/NAME; read as text, since what it leads to may hang.
_SCRIPT = """\
read -r uptime _ </proc/uptime && echo "uptime $uptime"
echo "current $(readlink -- {prefix})"
"""


@dataclass(frozen=True)
class NodeStatus:
    """A node that answered.

    Attributes:
        uptime: seconds since it was started; None when it does not say.
        release: the current one, "" when there is none.
    """

    uptime: float | None = None
    release: str = ""


@dataclass(frozen=True)
class Status:
    """All nodes at one moment.

    Attributes:
        nodes: those that answered, by name.
        unreachable: the others, each with its reason.
        offsets: of the clocks against the controller's, for nodes that told the time.
        apart: how far clocks may be apart, in seconds: ``skew_ms`` of the check clock.skew.
        runs: those that the nodes have told of, by id, the oldest first.
        users: by node name, the uid that the inventory logs in as.
    """

    nodes: Mapping[str, NodeStatus]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    apart: float = 0.05
    runs: Mapping[str, Run] = field(default_factory=dict)
    users: Mapping[str, int | None] = field(default_factory=dict)


def status(inventory: Inventory, nodes: Sequence[Node], *, prompts: Prompts | None = None, emit: Emit) -> Status:
    """Ask every node. Two round trips; changes nothing.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.
    """
    began = time.monotonic()
    emit(StageStarted(_STAGE, f"Asking {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}", len(nodes)))
    script = _SCRIPT.format(prefix=quote(inventory.prefix)) + runs.script(inventory)
    names = [node.name for node in inventory.nodes]
    with Connections(inventory, prompts) as connections:

        def ask(node: Node) -> tuple[NodeStatus, Told]:
            out = connections[node].run(script, deadline=_DEADLINE).out
            with reading(node):
                return read(out), told(node.name, out, names)

        said = fan_out(nodes, ask, limit=_AT_ONCE)
        found = {name: answer for name, answer in said.items() if isinstance(answer, tuple)}
        unreachable = {
            node.name: reason(answer, inventory, node)
            for node in nodes
            if isinstance(answer := said[node.name], ClusterctlError)
        }
        emit(StageFinished(_STAGE, time.monotonic() - began, dict.fromkeys(unreachable, "no answer")))
        there = tuple(node for node in nodes if node.name in found)
        clocks = clock.measure(Plan(inventory, there), connections, emit) if there else {}
    offsets = {name: one for name, answer in clocks.items() if (one := offset(answer))}
    return Status(
        nodes={name: answer for name, (answer, _) in found.items()},
        unreachable=unreachable,
        offsets=offsets,
        apart=limits("clock.skew", inventory.checks)["skew_ms"] / 1e3,
        runs=gathered(answer for _, answer in found.values()),
        users={name: answer.uid for name, (_, answer) in found.items()},
    )


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment; ``unreachable``: nodes that did not answer and may be its, each with its reason."""

    run: Run
    unreachable: Mapping[str, str]


def run_status(inventory: Inventory, nodes: Sequence[Node], word: str, *, prompts: Prompts | None = None) -> RunStatus:
    """Ask the nodes for one run. One round trip.

    Raises:
        UsageError: no run is meant, or several are.
        NodesFailedError: no node answered.
    """
    with Connections(inventory, prompts) as connections:
        run, found = runs.find(inventory, nodes, connections, word)
    silent = {name: why for name, why in found.unreachable.items() if name in run.nodes or run.missing}
    return RunStatus(run, silent)


def read(out: str) -> NodeStatus:
    """A node's answer."""
    uptime = re.search(r"^uptime ([0-9]{1,12}(?:\.[0-9]{1,6})?)$", out, re.MULTILINE)
    current = re.search(r"^current (?:.*/)?releases/([^/\n]+)/?$", out, re.MULTILINE)
    return NodeStatus(float(uptime[1]) if uptime else None, current[1] if current else "")
