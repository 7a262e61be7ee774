"""A rehearsal cluster that runs, or what is left of one: where its files are, and a hand on its nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, final

from provision.errors import ClusterctlError, UsageError
from provision.model import Emit, Node, ignore
from provision.sandbox import files, network, node
from provision.sandbox.process import SYSTEM_PATH, Process, kill
from provision.sandbox.state import NodeState, State, load_all, save
from provision.sandbox.take_down import down

Status = Literal["starting", "up", "broken"]


@final
@dataclass
class Sandbox:
    """A rehearsal cluster of this machine. As a context manager it goes down at the end of the block."""

    state: State

    @property
    def name(self) -> str:
        """What ``down`` takes."""
        return self.state.name

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, as an inventory would hold them."""
        return tuple(Node(name=each.name, address=each.address) for each in self.state.nodes)

    @property
    def directory(self) -> Path:
        """The folder that the inventory, the pinned host keys and the private key were written to."""
        return Path(self.state.directory)

    @property
    def inventory(self) -> Path:
        """The inventory file."""
        return self.directory / files.INVENTORY

    @property
    def known_hosts(self) -> Path:
        """The pinned host keys of the nodes, by address."""
        return self.directory / files.KNOWN_HOSTS

    @property
    def key(self) -> Path:
        """The private key that logs in as ``root`` and as ``trainer``."""
        return self.directory / files.KEY

    @property
    def rootfs(self) -> str:
        """``minimal`` or ``host``."""
        return self.state.rootfs

    @property
    def link(self) -> str | None:
        """The rate that every cable is shaped to, None when they are as fast as the machine."""
        return self.state.rate

    @property
    def subnet(self) -> str:
        """The private network, such as ``10.77.0.0/16``; its first address is this machine."""
        return self.state.subnet

    @property
    def created(self) -> str:
        """When it was made, in UTC and ISO 8601."""
        return self.state.created

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is broken, one sentence each; empty when it is not."""
        now = self.state
        if not now.same_boot:
            return ("the machine was restarted since",)
        if now.made == "starting" and not now.creator.alive:
            return (f"process {now.creator.pid}, which was making it, is gone",)
        if now.made == "starting":
            return ()
        return tuple(f"{each.name} is off" for each in now.nodes if not (each.init and each.init.alive))

    @property
    def status(self) -> Status:
        """``starting`` while another process makes it, ``up``, or ``broken``: see ``problems``."""
        if self.problems:
            return "broken"
        return self.state.made

    def node_root(self, name: str) -> Path:
        """The root folder of a running node, as it sees it itself, for reading and changing its files.

        Absolute links inside are followed on this machine, not in the node: use ``enter`` where that matters.

        Raises:
            ClusterctlError: the node does not run.
        """
        return Path(f"/proc/{self._running(name).pid}/root")

    def enter(
        self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program inside a node as its root, without ssh.

        Args:
            name: the node.
            argv: the program, looked up in the node, and its arguments.
            stdin: what it reads.
            timeout: seconds until it is killed and ``subprocess.TimeoutExpired`` raised.

        Raises:
            ClusterctlError: the node does not run.
        """
        pid = str(self._running(name).pid)
        into = ["nsenter", "--target", pid, "--mount", "--uts", "--ipc", "--net", "--pid"]
        return subprocess.run(
            [*into, "--", *argv],
            input=stdin,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
            env={"PATH": SYSTEM_PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"},
            check=False,
        )

    def log(self, name: str) -> str:
        """What the node's start and its sshd have written so far."""
        return node.log(self.state, self._node(name)).read_text(encoding="utf-8", errors="replace")

    def power_off(self, name: str) -> None:
        """Ends every process of a node at once, as a power cut does. Its disk stays; see ``power_on``."""
        kill([self._running(name)])

    def power_on(self, name: str) -> None:
        """Starts a node again that is off, and waits for its sshd.

        The disk is as it was, what lay in memory (``/dev/shm``, ``/run``) and what was mounted is gone. All nodes have
        the machine's kernel, whose boot id stays: a file with a new one is mounted over it in ``/proc``, so that
        programs of the node which look there see a new start. Uptime and start times of processes go on.

        Raises:
            ClusterctlError: the node is on.
            NodesFailedError: it does not come up.
        """
        off = self._node(name)
        if off.init and off.init.alive:
            raise ClusterctlError(f"{name} of sandbox {self.name} is on")

        def keep(started: State) -> None:
            nodes = tuple(started.nodes[0] if each.name == name else each for each in self.state.nodes)
            self.state = replace(self.state, nodes=nodes)
            save(self.state)

        started = node.start(replace(self.state, nodes=(off,)), keep, anew=True)
        script = "cat /proc/sys/kernel/random/uuid >/run/boot_id && mount --bind /run/boot_id {0}"
        done = self.enter(name, ["sh", "-c", script.format("/proc/sys/kernel/random/boot_id")])
        if done.returncode:
            raise ClusterctlError(f"{name} cannot be given a boot id: {done.stderr.strip()}")
        node.wait_ready(started, lambda _number: None)

    def unplug(self, name: str) -> None:
        """Pulls the network cable of a node, which runs on."""
        network.set_cable(self.state, self._node(name).link, connected=False)

    def plug(self, name: str) -> None:
        """Plugs the network cable of a node in again."""
        network.set_cable(self.state, self._node(name).link, connected=True)

    def down(self, emit: Emit = ignore) -> None:
        """Ends the sandbox: see ``provision.sandbox.down``."""
        down(self.name, emit=emit)

    def _node(self, name: str) -> NodeState:
        found = [each for each in self.state.nodes if each.name == name]
        if not found:
            known = ", ".join(each.name for each in self.state.nodes)
            raise UsageError(f"sandbox {self.name} has no node {name} (there: {known})")
        return found[0]

    def _running(self, name: str) -> Process:
        init = self._node(name).init
        if not (self.state.same_boot and init and init.alive):
            raise ClusterctlError(f"{name} of sandbox {self.name} is off")
        return init


def list_all() -> list[Sandbox]:
    """Every sandbox of this machine, also half-made and broken ones, by name."""
    return [Sandbox(each) for each in load_all()]
