"""``clusterctl top``: samples of nodes, with or without a run, each node in its own thread and connection.

The agent's own sampler runs on the node, as ``node_program.py`` sends it: a node needs no release and no run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.model import Node
from provision.run import fields
from provision.run.view import NodeView, View, node_view
from provision.tasks.node_program import ended, program_script, program_until
from provision.tasks.node_threads import NodeThreads

if TYPE_CHECKING:
    from provision.session import Session

AGAIN = 5.0  # seconds until a node that did not answer is asked again
LATE = 20.0  # seconds without a sample, besides the time between two, until a node counts as silent
ONCE = 40.0  # seconds for one sample: nvidia-smi may have to start its driver
MODULES = ("top", "sampling", "processes", "contract/__init__", "contract/throttle")


class Top(NodeThreads):
    """The threads that receive samples. In the ``with`` block, ``view`` returns what is known, and never waits."""

    def __init__(self, session: Session, every: float) -> None:
        super().__init__(session, session.nodes, AGAIN)
        self._every = every
        self._script = _script(session, "--every", f"{every:g}")
        self._samples: dict[str, tuple[float, NodeView]] = {}  # by node: when it came, in monotonic seconds
        self._silent: dict[str, str] = {}
        self._began = time.monotonic()

    def view(self) -> View:
        """The nodes as they are known now. Raises the unexpected exception of a thread."""
        self.check()
        now = time.monotonic()
        return View("", time.time(), nodes=tuple(self._node(node.name, now) for node in self.session.nodes))

    def _node(self, name: str, now: float) -> NodeView:
        at, found = self._samples.get(name, (self._began, NodeView(name)))
        why = self._silent.get(name, "")
        if not why and now - at > LATE + self._every:
            why = f"no sample for {now - at:.0f} s"
        return NodeView(found.name, state="no answer", silent=why) if why else found

    def ask(self, node: Node) -> None:
        """Take samples until the sampler ends."""
        result = self.session.connections[node].run(
            self._script, stdin=program_until(MODULES, self.over), on_line=lambda line: self._take(node.name, line)
        )
        self.silence(node, ended(result.err, result.rc))

    def silence(self, node: Node, reason: str) -> None:
        """Record that a node does not answer."""
        self._silent[node.name] = reason

    def _take(self, name: str, line: str) -> None:
        sample = fields.read(line)
        if sample is not None:
            self._samples[name] = time.monotonic(), node_view(name, sample)
            self._silent.pop(name, None)


def connect(session: Session) -> None:
    """Connect to the nodes: this may ask for a password or a host key, which a thread behind a screen cannot."""
    session.work("connect", "Connecting", lambda node: session.connections[node])


def snapshot(session: Session) -> tuple[View, Mapping[str, str]]:
    """One sample of each node, and why other nodes have none."""
    script, over = _script(session, "--once"), threading.Event()

    def ask(node: Node) -> NodeView:
        lines: list[str] = []
        result = session.connections[node].run(
            script,
            stdin=program_until(MODULES, over),
            on_line=lambda line: lines.append(line[: fields.LINE]),
            deadline=ONCE,
        )
        sample = next((found for line in reversed(lines) if (found := fields.read(line)) is not None), None)
        if sample is None:
            raise ClusterctlError(ended(result.err, result.rc))
        return node_view(node.name, sample)

    try:
        outcome = session.work("top", "Sampling", ask)
    finally:
        over.set()
    reasons = {name: str(why) for name, why in outcome.reasons.items()}
    silent = {name: NodeView(name, state="no answer", silent=why) for name, why in reasons.items()}
    found = {**outcome.ok, **silent}
    return View("", time.time(), nodes=tuple(found[node.name] for node in session.nodes)), reasons


def _script(session: Session, *options: str) -> str:
    options = ("top", "--folder", str(session.inventory.root), *options)
    return program_script((str(session.inventory.prefix),), MODULES, options)
