"""The files of a run on this node: the plan that the agent reads, and the events and the state that it writes.

``NodePlan.logs`` is the node's folder of the run. It holds ``events.jsonl``, ``state.json``, ``metrics.jsonl``,
``agent.log``, ``run.log`` (every line with its time and rank) and ``launcher.log`` (the output of the command itself).

``events.jsonl`` has one JSON object per line and is only appended to. A full disk ends the log, not the run. Log lines
and progress are dropped then, and counted. All other events are kept in memory (at most ``KEPT``) and written when
there is room again. Log lines that would fill the disk are dropped too; ``run.log`` has all of them.

Other processes see and stop the run by ``state.json``, the lock and the stop request. ``state.json`` holds ``run node
node_rank nnodes members excluded hub state phase step total loss attempt attempts checkpoint port why left saved
together resumable pattern world_size uid began time copied copying expected slow full measured spent`` (``copied``:
``keeping/keeper.py``, ``copying``: ``keeping/finishing.py``, the last five: ``pace.py``, ``account.py``) and the
agent's processes: ``pid`` and ``start``
(field 22 of /proc/PID/stat) of the supervisor, ``guard`` and ``guard_start`` of its guard, and ``boot_id``.
``node_rank`` is the node's position in the plan's roster. ``members`` are the nodes of the newest attempt in the order
of their ranks, ``excluded`` has by node why the run continues without it, and ``hub`` is the position of the link's
hub. ``together``: a meeting of the agents ended the run, so it is over on all nodes. ``state`` is one of starting,
meeting, spare, running, ending, finished, failed, stopped; the last three are final.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from .contract.plan import LIMIT as PLAN_LIMIT
from .contract.plan import Plan, PlanError, from_json
from .contract.untrusted import LIMIT as STATE_LIMIT
from .contract.untrusted import UntrustedError, parse_object
from .processes import read as read_proc
from .processes import stat_of


class NodePlan(NamedTuple):
    """A plan, the folder that its paths are relative to, and its file."""

    data: Plan
    folder: Path
    path: Path

    @property
    def run(self) -> str:
        """The run's id."""
        return self.data.run

    @property
    def node(self) -> str:
        """The node's name."""
        return self.data.node

    @property
    def rank(self) -> int:
        """The node's rank in an attempt. In the plan of a whole run: the node's position in ``Link.nodes``."""
        return self.data.node_rank

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        return self.data.grace

    @property
    def host(self) -> Optional[str]:
        """The address of rank 0's node, in the plan of a whole run that of this node; None for a run on one node."""
        return self.data.link.address(self.rank)[0] if self.data.link else None

    @property
    def cwd(self) -> Path:
        """The folder in which the command starts."""
        return self.folder / self.data.cwd

    @property
    def logs(self) -> Path:
        """The node's folder of the run."""
        return self.folder / self.data.logs

    @property
    def rank_logs(self) -> Path:
        """The folder for the output of ranks."""
        return self.folder / self.data.rank_logs if self.data.rank_logs else self.logs / "ranks"

    @property
    def progress(self) -> Optional[Path]:
        """The trainer's own log. Only rank 0 reads it: nodes may share its folder."""
        return self.folder / self.data.progress if self.data.progress and self.rank == 0 else None

    @property
    def output(self) -> Optional[Path]:
        """The folder of the checkpoints; None for a run that cannot be resumed."""
        return self.folder / self.data.resume.output if self.data.resume else None

    def resumed(self) -> NodePlan:
        """The same plan from the newest checkpoint, or from the first step without one."""
        return self._replace(data=self.data._replace(resuming=True, none_ok=True))


def load_plan(path: str) -> NodePlan:
    """Read a plan.

    Raises:
        PlanError: it cannot be read, or is not a plan.
        PermissionError: it belongs to another user.
    """
    where = Path(path).absolute()
    try:
        with where.open("rb") as file:
            plan = from_json(file.read(PLAN_LIMIT + 1))
    except PermissionError:
        raise
    except (PlanError, OSError) as error:
        raise PlanError("%s: %s" % (path, error)) from error
    except UntrustedError as error:
        raise PlanError("%s %s" % (path, error)) from error
    return NodePlan(plan, where.parent, where)


EVENTS = "events.jsonl"
KEPT = 100  # events that wait for free space on the disk
BURST = 4 << 20  # bytes of log lines at once
RATE = 256 << 10  # bytes of log lines per second in the long run

_PASSING = ("log", "progress")


class Events:
    """Writes the events.

    ``attempt`` is part of every event; ``echo`` is a descriptor that gets a copy. ``listener`` gets each event as an
    object, but no log lines and progress. ``account`` gets all but log lines, and returns fields to add to the event.
    """

    def __init__(self, logs: Path, echo: Optional[int] = None) -> None:
        self.attempt = 0
        self.listener: Optional[Callable[[Dict[str, Any]], None]] = None
        self.account: Optional[Callable[[Dict[str, Any]], Dict[str, Any]]] = None
        self._fd = os.open(logs / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._echo = echo
        self._kept: Deque[bytes] = collections.deque(maxlen=KEPT)
        self._torn = False  # the disk took only a part of the last line
        self._dropped = 0
        self._room = float(BURST)
        self._at = time.monotonic()

    def size(self) -> int:
        """Bytes in the file, including those of earlier attempts and agents."""
        return os.fstat(self._fd).st_size

    def emit(self, event: str, **fields: Any) -> None:
        """Write one event."""
        record = self._record(event, fields)
        if self.account is not None and event != "log":
            record.update(self.account(record))
        data = _line(record)
        if event == "log" and not self._has_room(len(data)):
            self._dropped += 1
            return
        while self._kept and self._write(self._kept[0]):
            self._kept.popleft()
        if self._dropped and not self._kept and self._write(_line(self._record("dropped", {"lines": self._dropped}))):
            self._dropped = 0
        if self._kept or not self._write(data):
            if event in _PASSING:
                self._dropped += 1
            else:
                self._kept.append(data)
        if self._echo is not None:
            try:
                os.write(self._echo, data)
            except OSError:  # the reader has closed it
                self._echo = None
        if self.listener is not None and event not in _PASSING:
            self.listener(record)

    def close(self) -> None:
        """Write the waiting events, if there is room, and close the file."""
        while self._kept and self._write(self._kept[0]):
            self._kept.popleft()
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _record(self, event: str, fields: Dict[str, Any]) -> Dict[str, Any]:
        return dict(event=event, time=round(time.time(), 3), attempt=self.attempt, **fields)

    def _has_room(self, size: int) -> bool:
        now = time.monotonic()
        self._room = min(BURST, self._room + (now - self._at) * RATE) - size
        self._at = now
        if self._room < 0:
            self._room += size
            return False
        return True

    def _write(self, data: bytes) -> bool:
        if self._torn:
            data = b"\n" + data  # readers skip the incomplete line
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                self._torn = True
                os.write(self._fd, data[written:])  # the rest, or the error
        except OSError:
            return False
        self._torn = False
        return True


def _line(record: Dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


STATE = "state.json"
REQUEST = "request.json"
LOCK = "agent.lock"
FINAL = ("finished", "failed", "stopped")
SAVE = 5.0  # seconds between writes when only progress has changed
BLOCK = 4096  # state.json is filled up to a multiple of this, so that a full disk can still take another one
TEXT = 2000  # characters of a reason


def boot_id() -> str:
    """The id of this start of the machine."""
    return read_proc("/proc/sys/kernel/random/boot_id").decode().strip()


def start_time(pid: int) -> str:
    """The start time of a process in clock ticks since the boot; empty when it has exited."""
    stat = stat_of(pid)
    return stat.start if stat is not None and stat.state not in "ZX" else ""


class State:
    """The state of a run on this node. Every change is written at once, except progress: every few seconds.

    ``account`` returns the account of the run's time, which is written with every change.
    """

    def __init__(self, logs: Path, **fields: Any) -> None:
        self.fields: Dict[str, Any] = dict(fields, boot_id=boot_id(), uid=os.getuid(), began=round(time.time(), 3))
        self.account: Optional[Callable[[], Dict[str, Any]]] = None
        self._path = logs / STATE
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
        if self.account is not None:
            self.fields["spent"] = self.account()
        data = json.dumps(self.fields, sort_keys=True).encode()
        data += b" " * (-(len(data) + 1) % BLOCK) + b"\n"
        fresh = self._path.with_name(".%s.%d" % (STATE, os.getpid()))
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


def read_state(logs: Path) -> Dict[str, Any]:
    """Read the last written state; empty when there is none.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        return _object(logs / STATE)
    except PermissionError:
        raise
    except (OSError, UntrustedError):
        return {}


def _object(path: Path) -> Dict[str, Any]:
    """Read the JSON object in a file, up to the size limit."""
    with path.open("rb") as file:
        return parse_object(file.read(STATE_LIMIT + 1))


def running_agents(state: Dict[str, Any]) -> List[Tuple[int, str]]:
    """Pid and start time of the supervisor and the guard, of those that are running on this machine."""
    if state.get("boot_id") != boot_id():
        return []
    processes = [(state.get("pid"), state.get("start")), (state.get("guard"), state.get("guard_start"))]
    return [
        (pid, start) for pid, start in processes if isinstance(pid, int) and pid and start and start_time(pid) == start
    ]


def lock_run(logs: Path) -> Optional[int]:
    """Lock the run on this node while the descriptor is open. None when another agent owns it."""
    fd = os.open(logs / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks; there the state decides.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES) or running_agents(read_state(logs)):
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
