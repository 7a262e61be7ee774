"""``clusterctl status``: what every node is doing now, how far apart the clocks are, and the runs.

Runs are found on the nodes, so any machine with the inventory sees them, no matter who started them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.checks import Plan, limits
from provision.checks.kit.measures import Offset, offset
from provision.env.text import number
from provision.render import quote
from provision.run.found import Run, merge_runs, parse_runs
from provision.tasks import runs
from provision.tasks.measures import clock

if TYPE_CHECKING:
    from provision.session import Session

_DEADLINE = 30.0

# The prefix is a link to releases/NAME. It is read as text, because accessing its target may hang.
_SCRIPT = """\
read -r uptime _ </proc/uptime && echo "uptime $uptime"
echo "current $(readlink -- {prefix})"
"""


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


def status(session: Session) -> Status:
    """Ask every node, in two round trips. Changes nothing."""
    inventory = session.inventory
    script = _SCRIPT.format(prefix=quote(inventory.prefix)) + runs.script(inventory)
    names = [node.name for node in inventory.nodes]
    outcome = session.ask(
        "status",
        f"Asking {number(len(session.nodes), 'node')}",
        script,
        lambda node, out: (read(out), parse_runs(node.name, out, names)),
        deadline=_DEADLINE,
    )
    there = outcome.of(session.nodes)
    clocks = clock.measure(Plan(inventory, there), session) if there else {}
    return Status(
        nodes={name: answer for name, (answer, _) in outcome.ok.items()},
        unreachable=outcome.reasons,
        offsets={name: one for name, answer in clocks.items() if (one := offset(answer))},
        apart=limits("clock.skew", inventory.checks)["skew_ms"] / 1e3,
        runs=merge_runs(answer for _, answer in outcome.ok.values()),
        users={name: answer.uid for name, (_, answer) in outcome.ok.items()},
    )


@dataclass(frozen=True)
class RunStatus:
    """One run at one moment; ``unreachable``: nodes that did not answer and may be the run's, each with its reason."""

    run: Run
    unreachable: Mapping[str, str]


def run_status(session: Session, word: str) -> RunStatus:
    """Ask the nodes for one run, in one round trip.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    run, found = runs.find(session, word)
    return RunStatus(run, found.silent(run))


def read(out: str) -> NodeStatus:
    """A node's answer."""
    uptime = re.search(r"^uptime ([0-9]{1,12}(?:\.[0-9]{1,6})?)$", out, re.MULTILINE)
    current = re.search(r"^current (?:.*/)?releases/([^/\n]+)/?$", out, re.MULTILINE)
    return NodeStatus(float(uptime[1]) if uptime else None, current[1] if current else "")
