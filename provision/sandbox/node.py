"""Starts nodes: creates namespaces, runs a short script in them that becomes sshd, and waits until sshd answers."""

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
from provision.sandbox.host import GONE, environment, identify, kill, wait_for_end, with_argv
from provision.sandbox.state import NodeState, State

_NAMESPACES = ("unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork")
_DEADLINE = 30.0  # seconds from the cable to sshd's banner; 64 nodes on two busy cores need about 5
_RETRY = 0.01  # seconds between two attempts to connect, in which the node's exit is noticed
# The devices that programs expect, and accelerators with their helpers for nodes with this machine's root.
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ACCELERATORS = ("nvidia*", "dri", "kfd", "infiniband")


def write_script(state: State, node: NodeState, lower: Path, sshd: str) -> None:
    """Writes the script that becomes the node. It stays in the sandbox's folder for inspection."""
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
    """The log of the node's start and of its sshd."""
    return state.folder(node) / "log"


def start(state: State, save: Callable[[State], None], *, restart: bool = False) -> State:
    """Starts every node and connects it to the network.

    Args:
        state: the sandbox; its nodes have their disks and scripts.
        save: called with the nodes' process ids before any node continues on its own.
        restart: the nodes were off; the network exists.

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
        if restart:
            network.replug(state)
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
        state: the sandbox; its nodes were started.
        progress: called with the number of nodes that have answered so far.

    Raises:
        NodesFailedError: a node died, or did not answer for 30 s; the reasons contain the last lines of its log.
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
    """Kills every process of every node, and waits until they have exited.

    The kernel kills all processes of a pid namespace with its first one.
    """
    if state.same_boot:
        kill([node.init for node in state.nodes if node.init])
    # Processes that start nodes, and nodes without a recorded process id, are found by the path of their script.
    launchers = [_command(state, node)[skip:] for node in state.nodes for skip in _SHOWN]
    while left := with_argv(launchers):
        kill(left)


def _script(state: State, node: NodeState) -> Path:
    return state.folder(node) / "node.sh"


def _command(state: State, node: NodeState) -> tuple[str, ...]:
    # setsid lets the node outlive this process and its terminal.
    return ("setsid", "--fork", *_NAMESPACES, "sh", str(_script(state, node)))


_SHOWN = (0, 2, 2 + len(_NAMESPACES))  # words to skip for the command lines of setsid, of unshare and of sh


def _banner(node: NodeState, until: float) -> str:
    """Waits for the first bytes of sshd. Returns why there are none, or "" if it answers."""
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
            # sshd listens after a few milliseconds, without an event to wait for; only its exit has one.
            if wait_for_end(pidfd, _RETRY):
                return "it died while it started"
        return f"sshd does not answer in {_DEADLINE:.0f} s: {reason}"
    finally:
        os.close(pidfd)


@final
@dataclass
class _Starting:
    """A node from its first process until sshd takes over; a pipe in each direction connects it with this process."""

    node: NodeState
    command: Sequence[str]
    log: Path

    def __enter__(self) -> _Starting:
        # Not this process's stderr: the node outlives it, and a reader of stderr would wait for the node.
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True
            )
        assert self._process.stdin
        assert self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        return self

    def __exit__(self, *_error: object) -> None:
        # A node without its cable exits when the pipe is closed.
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
                reasons={self.node.name: "its namespaces could not be created"},
                hint="try: unshare --mount --uts --ipc --net --pid --fork true",
            )
        return replace(self.node, init=init)

    def plug(self) -> None:
        """Notifies the node that its network device exists."""
        with suppress(BrokenPipeError):  # the node died; wait_ready reports the reason
            self._in.write("plugged\n")
            self._in.flush()

    def wait(self) -> None:
        """Waits until the node is set up except for sshd, or has died, which closes the pipe."""
        self._out.readline()
