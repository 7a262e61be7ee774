"""``clusterctl status``: what every node is doing at this moment, and how far the nodes' clocks are apart."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.checks import Plan
from provision.checks._choosing import limits
from provision.checks._clock import Offset, offset
from provision.errors import ClusterctlError
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import quote
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import reason
from provision.tasks.measures import clock

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

_STAGE = "status"
_AT_ONCE = 64  # nodes
_DEADLINE = 20.0

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
    """

    nodes: Mapping[str, NodeStatus]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    apart: float = 0.05


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
    script = _SCRIPT.format(prefix=quote(inventory.prefix))
    with Connections(inventory, prompts) as connections:

        def ask(node: Node) -> NodeStatus:
            return read(connections[node].run(script, deadline=_DEADLINE).out)

        said = fan_out(nodes, ask, limit=_AT_ONCE)
        found = {name: answer for name, answer in said.items() if isinstance(answer, NodeStatus)}
        unreachable = {
            node.name: reason(answer, inventory, node)
            for node in nodes
            if isinstance(answer := said[node.name], ClusterctlError)
        }
        emit(StageFinished(_STAGE, time.monotonic() - began, dict.fromkeys(unreachable, "no answer")))
        there = tuple(node for node in nodes if node.name in found)
        clocks = clock.measure(Plan(inventory, there), connections, emit) if there else {}
    offsets = {name: one for name, answer in clocks.items() if (one := offset(answer))}
    return Status(found, unreachable, offsets, limits("clock.skew", inventory.checks)["skew_ms"] / 1e3)


def read(out: str) -> NodeStatus:
    """A node's answer."""
    uptime = re.search(r"^uptime (\d+(?:\.\d+)?)$", out, re.MULTILINE)
    current = re.search(r"^current (?:.*/)?releases/([^/\n]+)/?$", out, re.MULTILINE)
    return NodeStatus(float(uptime[1]) if uptime else None, current[1] if current else "")
