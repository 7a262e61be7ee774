"""``clusterctl top``: samples of nodes, with or without a run, each node in its own thread and connection.

The agent's own sampler runs on the node. Its program is sent on stdin and runs from memory: a node needs no release, no
run and no free disk, and nothing remains when the connection ends.
"""

from __future__ import annotations

import io
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError
from provision.model import Node
from provision.render import render
from provision.run import fields
from provision.run.files import sources
from provision.run.view import NodeView, View, node_view
from provision.tasks.node_threads import NodeThreads

if TYPE_CHECKING:
    from provision.session import Session

AGAIN = 5.0  # seconds until a node that did not answer is asked again
LATE = 20.0  # seconds without a sample, besides the time between two, until a node counts as silent
ONCE = 40.0  # seconds for one sample: nvidia-smi may have to start its driver
_MODULES = ("__init__", "__main__", "top", "sampling", "processes", "contract/__init__", "contract/throttle")
# zipimport needs a path: the program is a file in memory.
_LOADER = """\
import os, sys
if sys.version_info < (3, 8):
    sys.exit("clusterctl top needs Python 3.8 or newer, this is %d.%d" % sys.version_info[:2])
size, data = int(sys.argv[1]), b""
while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
        sys.exit("clusterctl top: the connection ended")
    data += part
file = os.memfd_create("clusterctl-top")
while data:
    data = data[os.write(file, data):]
sys.path.insert(0, "/proc/self/fd/%d" % file)
from agent.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@cache
def program() -> bytes:
    """The part of the agent that samples, as a zip archive."""
    files = sources("agent")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name in _MODULES:
            out.writestr(f"agent/{name}.py", files[f"agent/{name}.py"])
    return archive.getvalue()


def top_script(prefix: str, root: str, options: Sequence[str]) -> str:
    """The script that samples a node; its stdin is ``program()``."""
    size = len(program())
    return render("run/top.sh.j2", prefix=prefix, root=root, loader=_LOADER, size=size, options=list(options))


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
            self._script, stdin=program_until(self.over), on_line=lambda line: self._take(node.name, line)
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
            script, stdin=program_until(over), on_line=lambda line: lines.append(line[: fields.LINE]), deadline=ONCE
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


def program_until(over: threading.Event) -> Iterator[bytes]:
    """The program, and then nothing until ``over``: the end of stdin ends it."""
    yield program()
    over.wait()


def ended(err: str, rc: int) -> str:
    """Why the sampler ended."""
    lines: list[Any] = err.strip().splitlines()
    return lines[-1][:200] if lines else f"the sampler ended with status {rc}"


def _script(session: Session, *options: str) -> str:
    return top_script(str(session.inventory.prefix), str(session.inventory.root), options)
