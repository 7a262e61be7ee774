"""The files by which other processes see and stop a run on this node: ``state.json``, the lock, the stop request.

``state.json`` holds ``run node node_rank nnodes state phase step total loss attempt attempts checkpoint port why
left saved resumable world_size uid began time`` and the agent's processes: ``pid`` and ``start`` (field 22 of
/proc/PID/stat) of the supervisor, ``guard`` and ``guard_start`` of its guard, and ``boot_id``. ``state`` is one of
starting, meeting, running, ending, finished, failed, stopped; the last three are final.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from .contract.untrusted import LIMIT, UntrustedError, parse_object
from .processes.proc import read as read_proc
from .processes.proc import stat_of

NAME = "state.json"
REQUEST = "request.json"
LOCK = "agent.lock"
FINAL = ("finished", "failed", "stopped")
SAVE = 5.0  # seconds between writes when only progress has changed
BLOCK = 4096  # state.json is filled up to a multiple of this, so that a full disk can still take another one
TEXT = 2000  # characters of a reason


def boot_id() -> str:
    """The id of this start of the machine."""
    return read_proc("/proc/sys/kernel/random/boot_id").decode().strip()


def identity(pid: int) -> str:
    """The start time of a process in clock ticks since the boot; empty when it has exited."""
    stat = stat_of(pid)
    return stat.start if stat is not None and stat.state not in "ZX" else ""


class State:
    """The state of a run on this node. Every change is written at once, except progress: every few seconds."""

    def __init__(self, logs: Path, **fields: Any) -> None:
        self.fields: Dict[str, Any] = dict(fields, boot_id=boot_id(), uid=os.getuid(), began=round(time.time(), 3))
        self._path = logs / NAME
        self._saved = 0.0
        self._stale = False

    def set(self, **fields: Any) -> None:
        """Change the state and write it.

        Raises:
            OSError: it was never written, and cannot be.
        """
        self.fields.update(fields)
        self._save()

    def note(self, **fields: Any) -> None:
        """Change fields that may reach the disk a few seconds later."""
        self.fields.update(fields)
        self._stale = True

    def refresh(self, now: float) -> None:
        """Write noted changes, when it is time."""
        if self._stale and now - self._saved >= SAVE:
            self._save()

    def _save(self) -> None:
        first = not self._saved
        self._saved = time.monotonic()
        self._stale = False
        self.fields["time"] = round(time.time(), 3)
        data = json.dumps(self.fields, sort_keys=True).encode()
        data += b" " * (-(len(data) + 1) % BLOCK) + b"\n"
        fresh = self._path.with_name(".%s.%d" % (NAME, os.getpid()))
        try:
            fresh.write_bytes(data)
            fresh.replace(self._path)
        except OSError:
            if first:
                raise
            with contextlib.suppress(OSError):
                fresh.unlink()
            with contextlib.suppress(OSError):  # a full disk: overwrite the existing file
                fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
                os.pwrite(fd, data, 0)
                os.close(fd)


def read(logs: Path) -> Dict[str, Any]:
    """Read the last written state; empty when there is none.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        return _object(logs / NAME)
    except PermissionError:
        raise
    except (OSError, UntrustedError):
        return {}


def _object(path: Path) -> Dict[str, Any]:
    """Read the JSON object in a file, up to the size limit."""
    with path.open("rb") as file:
        return parse_object(file.read(LIMIT + 1))


def agents(state: Dict[str, Any]) -> List[Tuple[int, str]]:
    """Pid and start time of the supervisor and the guard, of those that are running on this machine."""
    if state.get("boot_id") != boot_id():
        return []
    processes = [(state.get("pid"), state.get("start")), (state.get("guard"), state.get("guard_start"))]
    return [
        (pid, start) for pid, start in processes if isinstance(pid, int) and pid and start and identity(pid) == start
    ]


def lock(logs: Path) -> Optional[int]:
    """Lock the run on this node while the descriptor is open. None when another agent owns it."""
    fd = os.open(logs / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks; there the state decides.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or agents(read(logs)):
            os.close(fd)
            return None
    return fd


def write_request(logs: Path, *, save: bool, who: str) -> None:
    """Write the stop request; the agent reads it when it gets SIGUSR1."""
    fresh = logs / (".%s.%d" % (REQUEST, os.getpid()))
    fresh.write_text(json.dumps({"stop": True, "save": save, "who": who}), encoding="utf-8")
    fresh.replace(logs / REQUEST)


def read_request(logs: Path) -> Optional[Dict[str, Any]]:
    """The stop request, if there is one."""
    try:
        found = _object(logs / REQUEST)
    except (OSError, UntrustedError):
        return None
    return found if found.get("stop") else None


def delete_request(logs: Path) -> None:
    """Delete the stop request that an earlier agent got."""
    with contextlib.suppress(FileNotFoundError):
        (logs / REQUEST).unlink()
