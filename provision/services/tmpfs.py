"""tmpfs: a folder in RAM with huge pages, in which ``train --save-to memory`` saves.

The kernel writes to pages of 4 KiB at 2 to 3 GB/s for each process, and to huge ones at 6 to 10 GB/s. They have a
separate mount, because with ``huge=always`` a small file, such as a data loader's batch in ``/dev/shm``, may take 2
MiB. ``huge=within_size`` has no effect on files that grow as they are written in older kernels, such as 6.1: it looks
at the size that the file has (``shmem_is_huge`` in mm/shmem.c).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from provision.inventory.schema import Section
from provision.model import Step
from provision.render import quote
from provision.services.kit.changes import make_folder, require, write_block
from provision.services.kit.plans import NodeSteps
from provision.services.kit.ram import as_size, resize
from trainer.agent.contract.plan import RAM

if TYPE_CHECKING:
    from provision.model import Inventory

ABOUT = "a folder in RAM with huge pages, for checkpoints of `train --save-to memory`"
AFTER = ("os_packages",)
# Sets ``cc_mounted`` to the type and the options of what is mounted there; empty if nothing is.
_LOOK = f'cc_mounted=$(awk -v at={RAM} \'$2 == at {{ print $3 "," $4 "," }}\' /proc/mounts | tail -n 1)\n'
_IS_OURS = f"{_LOOK}case $cc_mounted in tmpfs,*,huge=always,*) true ;; *) false ;; esac"
_KERNEL = "/sys/kernel/mm/transparent_hugepage"


class Options(Section):
    """``services: tmpfs:``."""

    size: Annotated[str, BeforeValidator(as_size)] = "50%"  # RAM that files may use; an empty one uses none


def problems(_options: Options, _inventory: Inventory) -> Iterator[tuple[str, str]]:
    """No problems beyond the options' own validation."""
    yield from ()


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """The same mount on every node."""
    mount = f"rw,nosuid,nodev,mode=1777,size={options.size},huge=always"
    undo = f"! mountpoint -q {RAM} || umount {RAM}"
    steps = (
        make_folder("the folder", RAM),
        write_block("the mount at boot", "/etc/fstab", f"tmpfs {RAM} tmpfs {mount},x-mount.mkdir 0 0\n", mark="tmpfs"),
        Step(
            "the mount",
            unless=_IS_OURS,
            do=f"{_LOOK}"
            f'[ -z "$cc_mounted" ] || {{ cc_say "another file system is mounted on {RAM}"; exit 1; }}\n'
            f'[ -e {_KERNEL} ] || {{ cc_say "this kernel has no transparent huge pages ({_KERNEL})"; exit 1; }}\n'
            f"cc_journal mount sh -c {quote(undo)}\n"
            f"mount -t tmpfs -o {mount} tmpfs {RAM}",
        ),
        resize("the size", RAM, options.size),
    )
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", steps)


def verify(_options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Every user can write to it."""
    write = f"cc_file=$(mktemp {RAM}/.verify.XXXXXX) && rm -f $cc_file"
    test = f"{_IS_OURS} && su -s /bin/sh nobody -c {quote(write)}"
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (require("users can write", test, f'echo "no user can write to {RAM}"'),))
