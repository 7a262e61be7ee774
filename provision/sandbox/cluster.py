"""A rehearsal cluster, running or broken: its files, and methods that act on its nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, final

from provision.errors import ClusterctlError, UsageError
from provision.model import Emit, Node, Notice, ignore
from provision.sandbox import network, node
from provision.sandbox.host import SYSTEM_PATH, Process, kill, mounts, require_root, uninterrupted
from provision.sandbox.state import (
    INVENTORY,
    KEY,
    KNOWN_HOSTS,
    NodeState,
    State,
    forget,
    load,
    load_all,
    remove_files,
    save,
)
from provision.stages import stage

Status = Literal["starting", "up", "broken"]


@final
@dataclass
class Sandbox:
    """A rehearsal cluster of this machine. As a context manager it is removed at the end of the block."""

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
        """The nodes, as in an inventory."""
        return tuple(Node(name=each.name, address=each.address) for each in self.state.nodes)

    @property
    def directory(self) -> Path:
        """The folder with the inventory, the pinned host keys and the private key."""
        return Path(self.state.directory)

    @property
    def inventory(self) -> Path:
        """The inventory file."""
        return self.directory / INVENTORY

    @property
    def known_hosts(self) -> Path:
        """The pinned host keys of the nodes, by address."""
        return self.directory / KNOWN_HOSTS

    @property
    def key(self) -> Path:
        """The private key that logs in as ``root`` and as ``trainer``."""
        return self.directory / KEY

    @property
    def rootfs(self) -> str:
        """``minimal`` or ``host``."""
        return self.state.rootfs

    @property
    def link(self) -> str | None:
        """The rate limit of every cable; None if there is none."""
        return self.state.rate

    @property
    def subnet(self) -> str:
        """The private network, such as ``10.77.0.0/16``; its first address is this machine."""
        return self.state.subnet

    @property
    def created(self) -> str:
        """When it was created, in UTC and ISO 8601."""
        return self.state.created

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it is broken, one sentence each; empty when it is not."""
        now = self.state
        if not now.same_boot:
            return ("the machine was restarted",)
        if now.made == "starting" and not now.creator.alive:
            return (f"process {now.creator.pid}, which was creating it, exited",)
        if now.made == "starting":
            return ()
        return tuple(f"{each.name} is off" for each in now.nodes if not (each.init and each.init.alive))

    @property
    def status(self) -> Status:
        """``starting`` while another process creates it, ``up``, or ``broken``: see ``problems``."""
        if self.problems:
            return "broken"
        return self.state.made

    def node_root(self, name: str) -> Path:
        """The root folder of a running node, for reading and changing its files.

        Absolute links in it are followed on this machine, not in the node; use ``enter`` if that matters.

        Raises:
            ClusterctlError: the node is not running.
        """
        return Path(f"/proc/{self.init_process(name).pid}/root")

    def enter(
        self, name: str, argv: Sequence[str], *, stdin: str = "", timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program inside a node as its root, without ssh.

        Args:
            name: the node.
            argv: the program, looked up in the node, and its arguments.
            stdin: its input.
            timeout: seconds until it is killed and ``subprocess.TimeoutExpired`` is raised.

        Raises:
            ClusterctlError: the node is not running.
        """
        pid = str(self.init_process(name).pid)
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
        """The output of the node's start and of its sshd."""
        return node.log(self.state, self._node(name)).read_text(encoding="utf-8", errors="replace")

    def power_off(self, name: str) -> None:
        """Kills every process of a node at once, like a power cut. Its disk stays; see ``power_on``."""
        kill([self.init_process(name)])

    def power_on(self, name: str) -> None:
        """Starts a node that is off, and waits for its sshd.

        The disk is unchanged; files in memory (``/dev/shm``, ``/run``) and mounts are lost. All nodes use the machine's
        kernel and its boot id, so a file with a new id is mounted over it in ``/proc``. Uptime and start times of
        processes do not restart.

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

        started = node.start(replace(self.state, nodes=(off,)), keep, restart=True)
        script = "cat /proc/sys/kernel/random/uuid >/run/boot_id && mount --bind /run/boot_id {0}"
        done = self.enter(name, ["sh", "-c", script.format("/proc/sys/kernel/random/boot_id")])
        if done.returncode:
            raise ClusterctlError(f"{name} cannot be given a boot id: {done.stderr.strip()}")
        node.wait_ready(started, lambda _number: None)

    def unplug(self, name: str) -> None:
        """Disconnects the network cable of a node, which keeps running."""
        network.set_cable(self.state, self._node(name).link, connected=False)

    def plug(self, name: str) -> None:
        """Reconnects the network cable of a node."""
        network.set_cable(self.state, self._node(name).link, connected=True)

    def down(self, emit: Emit = ignore) -> None:
        """Removes the sandbox: see ``provision.sandbox.down``."""
        down(self.name, emit=emit)

    def _node(self, name: str) -> NodeState:
        found = [each for each in self.state.nodes if each.name == name]
        if not found:
            known = ", ".join(each.name for each in self.state.nodes)
            raise UsageError(f"sandbox {self.name} has no node {name} (there: {known})")
        return found[0]

    def init_process(self, name: str) -> Process:
        """The first process of a node, whose namespaces are the node's.

        Raises:
            ClusterctlError: the node is not running.
        """
        init = self._node(name).init
        if not (self.state.same_boot and init and init.alive):
            raise ClusterctlError(f"{name} of sandbox {self.name} is off")
        return init


def list_all() -> list[Sandbox]:
    """Every sandbox of this machine by name, including incomplete and broken ones."""
    return [Sandbox(each) for each in load_all()]


STAGE = "down"


def down(name: str, *, emit: Emit = ignore) -> None:
    """Removes a sandbox: its processes, namespaces, mounts, network devices, disks, and the files of ``up``.

    Changed files in the user's folder are kept and reported.

    Args:
        name: the sandbox, which may be broken.
        emit: receives the stage ``down``, and notices about kept files.

    Raises:
        UsageError: there is no such sandbox, it is being created, or the user is not root.
        ClusterctlError: a part of it cannot be removed.
    """
    require_root(f"clusterctl sandbox down {name}")
    state = load(name)
    if state.made == "starting" and state.creator.alive and state.same_boot and state.creator.pid != os.getpid():
        raise UsageError(
            f"sandbox {name} is being created by process {state.creator.pid}", hint=f"kill {state.creator.pid}"
        )
    with stage(emit, STAGE, f"Removing sandbox {name}", len(state.nodes)) as shown:
        with uninterrupted():
            remove(state, emit)
        shown.states = {each.name: "removed" for each in state.nodes}


def remove(state: State, emit: Emit = ignore) -> None:
    """Removes everything in ``state``, and the state file last."""
    node.kill_all(state)  # the kernel then removes their namespaces and mounts
    network.unplug(state)
    _remove_disks(Path(state.storage))
    for path in remove_files(state):
        emit(Notice(f"{path} was changed and is kept"))
    forget(state)


def _remove_disks(storage: Path) -> None:
    """Removes the nodes' disks, unless something is mounted there."""
    mounted = [point for point, _ in mounts() if point.is_relative_to(storage)]
    if mounted:
        raise ClusterctlError(f"{mounted[0]} is mounted in a sandbox's folder", hint=f"umount {mounted[0]}")
    if storage.exists():
        shutil.rmtree(storage)
