"""Ending a sandbox, whole or half-made. Every step takes what is there and does not mind what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from provision.errors import ClusterctlError, UsageError
from provision.model import Emit, Notice, ignore
from provision.sandbox import files, network, node
from provision.sandbox.host import mounts, require_root
from provision.sandbox.signals import uninterrupted
from provision.sandbox.state import State, forget, load
from provision.stages import stage

STAGE = "down"


def down(name: str, *, emit: Emit = ignore) -> None:
    """Ends a sandbox: its processes, namespaces, mounts, network devices, disks, and the files that ``up`` wrote.

    A file in the user's folder that was changed since is kept, and said.

    Args:
        name: the sandbox, which may be broken.
        emit: told of the stage ``down``, and of files that are kept.

    Raises:
        UsageError: there is no such sandbox, it is being made just now, or we are not root.
        ClusterctlError: something of it cannot be removed.
    """
    require_root(f"clusterctl sandbox down {name}")
    state = load(name)
    if state.made == "starting" and state.creator.alive and state.same_boot and state.creator.pid != os.getpid():
        raise UsageError(
            f"sandbox {name} is being made by process {state.creator.pid}", hint=f"kill {state.creator.pid}"
        )
    with stage(emit, STAGE, f"Ending sandbox {name}", len(state.nodes)) as shown:
        with uninterrupted():
            remove(state, emit)
        shown.states = {each.name: "gone" for each in state.nodes}


def remove(state: State, emit: Emit = ignore) -> None:
    """Removes all that ``state`` names, the state file last."""
    node.kill_all(state)  # with the processes go their namespaces, and with those the mounts
    network.unplug(state)
    _remove_disks(Path(state.storage))
    for path in files.remove(state):
        emit(Notice(f"{path} was changed and is kept"))
    forget(state)


def _remove_disks(storage: Path) -> None:
    """Removes the nodes' disks, but never what somebody has mounted there."""
    mounted = [point for point, _ in mounts() if point.is_relative_to(storage)]
    if mounted:
        raise ClusterctlError(f"{mounted[0]} is mounted in a sandbox's folder", hint=f"umount {mounted[0]}")
    if storage.exists():
        shutil.rmtree(storage)
