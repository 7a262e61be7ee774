"""Starting nodes: new namespaces, a short script that becomes sshd in them, and waiting until it answers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import final

from provision.errors import NodesFailedError
from provision.render import render
from provision.sandbox import network
from provision.sandbox.process import GONE, ended, environment, identify, kill, with_argv
from provision.sandbox.state import NodeState, State

_NAMESPACES = ("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork")
_DEADLINE = 30.0  # seconds from the cable to sshd's banner; 64 nodes on two busy cores need about 5
_RETRY = 0.01  # seconds that a node's death is waited for between two attempts to connect
# What programs expect of /dev, and accelerators with their helpers, which a node with this machine's root may use.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ACCELERATORS = ("nvidia*", "dri", "kfd", "infiniband")


def write_script(state: State, node: NodeState, lower: Path, sshd: str) -> None:
    """Writes the script that becomes the node. It stays in the sandbox's folder, to be read."""
    folder = state.folder(node)
    devices = [Path("/dev", name) for name in _DEVICES]
    if state.rootfs == "host":
        devices += sorted(path for pattern in _ACCELERATORS for path in Path("/dev").glob(pattern))
    text = render(
        "sandbox/node.sh.j2",
        name=node.name,
        address=f"{node.address}/{IPv4Network(state.subnet).prefixlen}",
        overlay=f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}",
        root=folder / "root",
        devices=devices,
        sshd=sshd,
        rate=state.rate or "",
        burst=network.burst(state.rate) if state.rate else 0,
    )
    _script(state, node).write_text(text, encoding="utf-8", errors="surrogateescape")


def log(state: State, node: NodeState) -> Path:
    """What the node's start and its sshd have written."""
    return state.folder(node) / "log"


def start(state: State, save: Callable[[State], None], *, anew: bool = False) -> State:
    """Starts every node and connects it to the network.

    Args:
        state: whose nodes have their disks and scripts.
        save: called with the process ids of the nodes before any of them goes on without us.
        anew: the nodes were off; the network is there.

    Returns:
        The state with the nodes' first processes.

    Raises:
        NodesFailedError: some did not start.
    """
    with ExitStack() as stack:
        starting = [
            stack.enter_context(_Starting(node, _command(state, node), log(state, node))) for node in state.nodes
        ]
        state = replace(state, nodes=tuple(each.identified() for each in starting))
        save(state)
        if anew:
            network.plug_anew(state)
        else:
            network.plug(state)
        for each in starting:
            each.plug()
        for each in starting:
            each.wait()
    return state


def wait_ready(state: State, progress: Callable[[int], None]) -> None:
    """Waits until the sshd of every node has sent its banner.

    Args:
        state: whose nodes were started.
        progress: called with the number of nodes that have answered so far.

    Raises:
        NodesFailedError: a node died, or says nothing for 30 s; with the last lines of its log.
    """
    until = time.monotonic() + _DEADLINE
    reasons: dict[str, str] = {}
    for node in state.nodes:
        reason = _banner(node, until)
        if reason:
            with suppress(OSError):
                lines = log(state, node).read_text(encoding="utf-8", errors="replace").splitlines()
                reason = "; ".join([reason, *lines[-3:]])
            reasons[node.name] = reason
        progress(len(state.nodes) if node is state.nodes[-1] else state.nodes.index(node) + 1)
    if reasons:
        raise NodesFailedError(f"{len(reasons)} of {len(state.nodes)} nodes did not come up", reasons=reasons)


def kill_all(state: State) -> None:
    """Ends every process of every node, and waits until they are gone.

    The kernel ends all processes of a pid namespace with its first one.
    """
    if state.same_boot:
        kill([node.init for node in state.nodes if node.init])
    # What started the nodes, and nodes whose process id was not recorded yet: they show the path of their script.
    launchers = [_command(state, node)[skip:] for node in state.nodes for skip in _SHOWN]
    while left := with_argv(launchers):
        kill(left)


def _script(state: State, node: NodeState) -> Path:
    return state.folder(node) / "node.sh"


def _command(state: State, node: NodeState) -> tuple[str, ...]:
    # setsid lets the node outlive this process and its terminal.
    return ("setsid", "--fork", *_NAMESPACES, "sh", str(_script(state, node)))


_SHOWN = (0, 2, 2 + len(_NAMESPACES))  # the command line as setsid's, as unshare's, as that of sh


def _banner(node: NodeState, until: float) -> str:
    """Waits for the first bytes of sshd. Returns why there are none, "" when it answers."""
    assert node.init is not None
    try:
        pidfd = os.pidfd_open(node.init.pid)
    except GONE:
        return "it died while it started"
    reason = "sshd closes every connection"
    try:
        while (left := until - time.monotonic()) > 0:
            try:
                with socket.create_connection((node.address, 22), timeout=left) as connection:
                    if connection.recv(4) == b"SSH-":
                        return ""
            except OSError as error:
                reason = str(error)
            # sshd listens in a few milliseconds, and nothing tells when; its end would be told.
            if ended(pidfd, _RETRY):
                return "it died while it started"
        return f"sshd does not answer in {_DEADLINE:.0f} s: {reason}"
    finally:
        os.close(pidfd)


@final
@dataclass
class _Starting:
    """A node from its first process until sshd takes over; a pipe each way connects it with us."""

    node: NodeState
    command: Sequence[str]
    log: Path

    def __enter__(self) -> _Starting:
        # Not our stderr: a node lives on, and who reads that of clusterctl waits for its end.
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True
            )
        assert self._process.stdin
        assert self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *_error: object) -> None:
        # A node without its cable ends when the pipe does.
        for pipe in (self._in, self._out):
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()

    def identified(self) -> NodeState:
        """The node with its first process, which reports its id itself."""
        line = self._out.readline().strip()
        init = identify(int(line)) if re.fullmatch("[0-9]{1,9}", line) else None
        if not init:
            raise NodesFailedError(
                f"{self.node.name} did not start",
                reasons={self.node.name: "its namespaces could not be made"},
                hint="try: unshare --mount --uts --ipc --net --pid --fork true",
            )
        return replace(self.node, init=init)

    def plug(self) -> None:
        """Tells the node that its network device is there."""
        with suppress(BrokenPipeError):  # it has died, which wait_ready tells with the reason
            self._in.write("plugged\n")
            self._in.flush()

    def wait(self) -> None:
        """Waits until the node has set up all but sshd itself, or died, which closes the pipe."""
        self._out.readline()
