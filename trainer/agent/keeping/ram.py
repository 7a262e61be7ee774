"""The folder in RAM of a run's node: where it is, and whether RAM is large enough for checkpoints."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, List, NamedTuple, Optional

from ..checkpoints.places import find
from ..contract.plan import RAM
from ..run_files import NodePlan
from .moving import MARK, files_below, signs_of

SHM = Path("/dev/shm")  # noqa: S108 - tmpfs on every Linux; the folder in it is private
HUGE = Path(RAM)
LEAST = 256 << 20  # bytes that RAM must have for a checkpoint whose size is not known yet
SPARE = 2  # checkpoints that must fit: one is written while another one is copied to the disk
USABLE = 0.5  # share of the available RAM that checkpoints may use; the ranks need the rest


class Ram(NamedTuple):
    """Bytes: free in the file system, and available in the machine."""

    free: int
    available: int


def why_not(ram: Ram, checkpoint: Optional[int], base: Path = SHM) -> Optional[str]:
    """Why RAM is too small for checkpoints of this size (None: not known) in the file system ``base``, or None."""
    needed = LEAST if checkpoint is None else SPARE * checkpoint
    if ram.free < needed:
        return "%s has %d MB free, but %d MB are needed; enlarge it: mount -o remount,size=%dM %s" % (
            base, ram.free >> 20, needed >> 20, (needed >> 20) * 2, base,
        )  # fmt: skip
    if ram.available * USABLE < needed:
        return "%d MB of RAM are available, but %d MB are needed" % (ram.available >> 20, int(needed / USABLE) >> 20)
    return None


def file_system() -> Path:
    """The file system in RAM for checkpoints."""
    return HUGE if os.path.ismount(str(HUGE)) else SHM


def folder_of(plan: NodePlan, base: Path) -> Path:
    """The folder in RAM of a run's node."""
    return base / ("clusterctl-%d" % os.geteuid()) / ("%s-%s" % (plan.run, plan.node.replace("/", "_")))


def _is_ours(folder: Path) -> bool:
    """Whether an agent of this user made the folder: another user may write to a file system in RAM."""
    for each in (folder.parent, folder):
        found = each.lstat() if os.path.lexists(str(each)) else None
        if found is None or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
    return (folder / MARK).exists()


def left_in_ram(plan: NodePlan, base: Optional[Path] = None) -> List[Path]:
    """The folders in RAM that an agent which was killed has left; ``base``: only the one in this file system."""
    folders = [folder_of(plan, each) for each in ([base] if base else (HUGE, SHM))]
    return [folder for folder in folders if _is_ours(folder)]


def why_unusable(base: Path, disk: Path) -> Optional[str]:
    """Why checkpoints like those in the output folder ``disk`` cannot be saved in the file system ``base``, or None.

    Raises:
        OSError: the newest checkpoint or the file system cannot be read.
    """
    why = _removed_at_logout() if base != HUGE else None
    return why or why_not(_ram(base), _size_of_newest(disk), base)


def _ram(base: Path) -> Ram:
    from ..probe import memory_available  # noqa: PLC0415

    found = os.statvfs(base)
    return Ram(found.f_bavail * found.f_frsize, memory_available() or 0)


def _size_of_newest(disk: Path) -> Optional[int]:
    """The size of this node's part of the newest checkpoint; None without one."""
    found = find(disk).checkpoints
    if not found:
        return None
    newest: Any = max(found, key=lambda one: (disk / one.name).stat().st_mtime_ns)
    names = [newest.name] if newest.single else [newest.name + "/" + name for name in files_below(disk / newest.name)]
    return sum(size for size, _ in signs_of(disk, names).values())


def _removed_at_logout() -> Optional[str]:
    """Why systemd would delete the folder at the user's last logout, or None (logind.conf(5), RemoveIPC)."""
    from ..start import removes_ipc, user_name  # noqa: PLC0415

    if not removes_ipc():
        return None
    text = "systemd deletes files in %s at the last logout (RemoveIPC=yes). As root, run: loginctl enable-linger %s"
    return text % (SHM, user_name())
