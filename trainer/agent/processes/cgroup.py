"""A cgroup for the run's processes, where one can be made: nothing that a process does gets it out of there.

Only cgroup v2, and only where this user may write its root (in practice root's runs). No controller is switched on:
it is a list of processes that the kernel keeps, and a way to end all of them at once. Everywhere else the marks of
``proc.py`` do.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Callable, List, Optional

from processes.proc import read

BUSY = 1.0  # seconds in which the kernel lets go of processes that have ended
LOOK = 0.01  # seconds between tries


def mounted(table: str = "/proc/self/mounts") -> Optional[str]:
    """Where cgroup v2 is mounted."""
    for line in read(table).decode("utf-8", "replace").splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return fields[1]
    return None


class Group:
    """One run's cgroup on one node; ``path`` is None where there is none, and everything is empty then."""

    def __init__(self, run: str, node: str) -> None:
        root = mounted()
        name = "clusterctl-" + re.sub(r"[^A-Za-z0-9._-]", "-", "%s-%s" % (run, node))
        self.path = "%s/%s" % (root, name) if root else None
        self._made = self.path is not None and os.path.isdir(self.path)  # noqa: PTH112

    def make(self) -> bool:
        """Make it, or take the one that is there. False where that is not possible."""
        if self.path is None:
            return False
        with contextlib.suppress(OSError):
            os.mkdir(self.path)  # noqa: PTH102
        self._made = os.access(self.path + "/cgroup.procs", os.W_OK)
        return self._made

    def entering(self) -> Callable[[], None]:
        """For ``preexec_fn``: the process goes in before it becomes the command."""
        path = "%s/cgroup.procs" % self.path if self._made else None

        def enter() -> None:
            if path is None:
                return
            with contextlib.suppress(OSError):  # then the marks must do
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, b"0")
                os.close(fd)

        return enter

    def pids(self) -> List[int]:
        """The processes that are in it."""
        if not self._made:
            return []
        return [int(word) for word in read("%s/cgroup.procs" % self.path).split() if word != b"0"]

    def kill(self) -> None:
        """SIGKILL to all of them at once (Linux 5.14; older ones have no such file)."""
        if self._made:
            with contextlib.suppress(OSError):
                fd = os.open("%s/cgroup.kill" % self.path, os.O_WRONLY | os.O_CLOEXEC)
                os.write(fd, b"1")
                os.close(fd)

    def remove(self) -> None:
        """Take it away; one that still holds a process after ``BUSY`` seconds stays."""
        limit = time.monotonic() + BUSY
        while self._made and not self._removed() and time.monotonic() < limit:
            time.sleep(LOOK)  # what was just ended is still on its way out; nothing tells when it is

    def _removed(self) -> bool:
        try:
            os.rmdir(str(self.path))  # noqa: PTH106
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True
