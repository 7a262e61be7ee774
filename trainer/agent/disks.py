"""Reports a disk that gets full: that of the run's folder, and that of its checkpoints.

A file system on the network may not answer for hours. So another thread asks, and at most one question waits. All nodes
see such a file system, so only rank 0's node reports it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Set

from .notify import DISK_FULL
from .processes import read
from .run_files import Events, NodePlan

LOW = 0.02  # share of a file system's bytes or files that is free when it is reported
ENOUGH = 0.04  # share above which it counts as emptied, and is reported again if it fills up


NETWORK = ("beegfs", "gpfs", "wekafs")  # types whose sources name no host


class Disk(NamedTuple):
    """A file system: its device, a folder on it, and the free share of its bytes or files, with that in words."""

    device: int
    folder: Path
    free: float
    text: str


def measure(folder: Path) -> Optional[Disk]:
    """The file system of a folder, or of the nearest folder that exists; None if it does not answer."""
    with contextlib.suppress(OSError):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        found = os.statvfs(folder)
        shares = [
            (free / total, "%s of %s free" % (described(free), described(total)))
            for free, total, described in (
                (found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, _size),
                (found.f_favail, found.f_files, "{:,} inodes".format),
            )
            if total > 0
        ]
        return Disk(folder.stat().st_dev, folder, *min(shares)) if shares else None
    return None


def _size(count: int) -> str:
    value, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        del units[0]
    return "%.3g %s" % (value, units[0])


def on_network(device: int, mountinfo: str) -> bool:
    """Whether a device is a file system on the network, by /proc/self/mountinfo (proc(5))."""
    number = "%d:%d" % (os.major(device), os.minor(device))
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind, source = left.split(), *(right + "  ").split(" ")[:2]
        if len(fields) > 2 and fields[2] == number:
            return ":" in source or source.startswith("//") or kind in NETWORK  # host:/path, //host/share
    return False


class Disks:
    """The disks of a run on this node."""

    def __init__(self, plan: NodePlan, events: Events) -> None:
        self._rank = plan.rank
        self._folders = [plan.folder, *([plan.output] if plan.output is not None else [])]
        self._events = events
        self._reported: Set[int] = set()  # devices
        self._found: List[Disk] = []
        self._thread: Optional[threading.Thread] = None

    def look(self) -> None:
        """Report what the last question found, and ask again."""
        if self._thread is not None and self._thread.is_alive():
            return
        for disk in self._found:
            self._judge(disk)
        self._thread = threading.Thread(target=self._ask, name="disks", daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        mounts = read("/proc/self/mountinfo").decode("utf-8", "replace")
        found: Dict[int, Disk] = {}
        for disk in map(measure, self._folders):
            if disk is not None and not (self._rank and on_network(disk.device, mounts)):
                found.setdefault(disk.device, disk)
        self._found = list(found.values())

    def _judge(self, disk: Disk) -> None:
        if disk.free > ENOUGH:
            self._reported.discard(disk.device)
        elif disk.free < LOW and disk.device not in self._reported:
            self._reported.add(disk.device)
            text = "the disk of %s is almost full: %s. Free some space before the next checkpoint"
            self._events.emit("notice", kind=DISK_FULL, text=text % (disk.folder, disk.text))
