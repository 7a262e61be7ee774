"""Owns a run's processes on one node: starts them, tells what they do, and leaves none behind.

The plan (``plan-<rank>.json``); relative paths are relative to the folder it lies in:

=============  =====================================================================================
``run``        the run's id; every process carries it as ``CLUSTERCTL_RUN``
``node``       the node's name; carried as ``CLUSTERCTL_NODE``
``argv``       the command
``env``        set for it, over the few variables that are inherited (``KEPT``)
``unset``      taken out of what is inherited
``cwd``        where it starts
``logs``       folder for ``run.log`` (every line with its time and rank) and ``launcher.log`` (the
               command's own output as it is)
``rank_logs``  optional: torchrun's ``--log-dir``
``first_rank`` optional: the global rank of local rank 0
``progress``   optional: LLaMA-Factory's ``trainer_log.jsonl``
``private``    optional: folders to make for this user alone
``grace``      seconds between SIGTERM and SIGKILL; 10
=============  =====================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

from events import Events
from logs import Lines, Progress, RankLogs
from processes import NODE, RUN, adopt_orphans, die_with_parent, members, reap, send

KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TZ", "TMPDIR", "LANG", "XDG_RUNTIME_DIR")
KEPT_PREFIXES = ("LC_", "NCCL_", "CUDA_", "NVIDIA_", "UCX_")  # what a site sets for its machines
TICK = 0.25  # seconds between looks at the files that grow
HURRY = 0.05  # the same, and between looks for survivors, while the run is being ended
LOOK = 1.0  # seconds between looks for new files
STUBBORN = 30.0  # seconds after SIGKILL until a process is given up: it hangs in the kernel
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def environment(plan: Dict[str, Any], inherited: Dict[str, str]) -> Dict[str, str]:
    """The command's environment: clean, so that it is the same however the agent was started."""
    env = {name: value for name, value in inherited.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    for name in plan.get("unset", []):
        env.pop(name, None)
    env.update(plan["env"])
    env[RUN] = plan["run"]
    env[NODE] = plan["node"]
    return env


def make_private(path: Path) -> None:
    """Make a folder that only this user may write, or refuse one that somebody else has put there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("%s is not a folder that only this user may write; remove it" % path)


class Supervisor:
    """One run on one node. ``run`` does all of it."""

    def __init__(self, plan: Dict[str, Any], folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.status: Optional[int] = None  # of the command, once it has ended
        self.stopped = False
        self.ending: Optional[float] = None  # when the rest was first told to end
        self.left: List[int] = []
        self._told: Set[int] = set()
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self.events = Events(1, on_broken=self._nudge)
        self._launcher_lines = Lines()

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _path(self, key: str) -> Optional[Path]:
        value = self.plan.get(key)
        return self.folder / value if value else None

    def run(self) -> int:
        """Start the command, follow it to its end, end what is left of it, and say how it went."""
        for number in (*STOPPING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        adopt_orphans()
        try:
            child = self._start()
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = "%s: %s" % (type(error).__name__, error)
            self.events.emit("exit", rc=None, signal=None, stopped=False, error=why)
            self.events.close(10)
            return 1
        self.events.emit("started", pid=child.pid)
        self._follow(child)
        return self._finish(child)

    def _start(self) -> "subprocess.Popen[bytes]":
        plan = self.plan
        logs = self._path("logs") or self.folder
        logs.mkdir(parents=True, exist_ok=True)
        for folder in plan.get("private", []):
            make_private(Path(folder))
        # The run's own log files stay open to its end.
        self._run_log = (logs / "run.log").open("a", encoding="utf-8", buffering=1)
        self._launcher_log = (logs / "launcher.log").open("ab", buffering=0)
        rank_logs = self._path("rank_logs")
        if rank_logs:
            rank_logs.mkdir(parents=True, exist_ok=True)
        self._ranks = RankLogs(rank_logs or logs / "ranks", int(plan.get("first_rank", 0)))
        self._progress = Progress(self._path("progress"))
        return subprocess.Popen(
            plan["argv"],
            env=environment(plan, dict(os.environ)),
            cwd=self._path("cwd") or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - there is only one thread yet
        )

    def _follow(self, child: "subprocess.Popen[bytes]") -> None:
        """Until every process of the run has ended."""
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        looked = told = ended = 0.0
        with selectors.PollSelector() as selector:  # epoll refuses a stdin that is a file
            selector.register(self._wake, selectors.EVENT_READ, self._woken)
            selector.register(0, selectors.EVENT_READ, self._stdin)
            selector.register(child.stdout, selectors.EVENT_READ, self._output)
            while True:
                for key, _ in selector.select(TICK if self.ending is None else HURRY):
                    if not key.data(key.fd):
                        selector.unregister(key.fileobj)
                status = reap(child.pid)
                if status is not None:
                    self.status = status
                    child.returncode = status  # Popen must not wait for it again
                now = time.monotonic()  # chatty output must not make the rest be done more often
                if now - looked >= LOOK:
                    looked = now
                    self._ranks.look()
                if now - told >= TICK:
                    told = now
                    self._tell()
                if (self.stopped or self.status is not None) and now - ended >= HURRY:
                    ended = now
                    if self._ended(now):
                        break
        limit = time.monotonic() + 2  # somebody else may hold the pipe, and write
        while time.monotonic() < limit and self._take(child.stdout.fileno()):
            pass

    def _woken(self, fd: int) -> bool:
        numbers = set(os.read(fd, 4096))
        if numbers & set(STOPPING) or self.events.broken:
            self._stop()
        return True

    def _stdin(self, fd: int) -> bool:
        try:
            data = os.read(fd, 4096)
        except OSError:
            data = b""
        if not data:
            self._stop()
        return bool(data)

    def _stop(self) -> None:
        if self.status is None:
            self.stopped = True

    def _output(self, fd: int) -> bool:
        """Take some of what the command itself has written. False at its end."""
        return self._take(fd) != b""

    def _take(self, fd: int) -> Optional[bytes]:
        try:
            data = os.read(fd, 64 << 10)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._keep(self._launcher_log, data)
        for line in self._launcher_lines.feed(data):
            self._line(None, line)
        return data

    def _tell(self, last: bool = False) -> None:
        for rank, line in self._ranks.lines(last):
            self._line(rank, line)
        for progress in self._progress.events():
            self.events.emit("progress", **progress)

    def _line(self, rank: Optional[int], line: str) -> None:
        self.events.emit("log", rank=rank, line=line)
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + ".%03dZ" % (now % 1 * 1000)
        self._keep(self._run_log, "%s [%s] %s\n" % (at, "launcher" if rank is None else rank, line))

    def _keep(self, file: Any, data: Any) -> None:
        """Write to a log file. A full disk ends the log, not the run."""
        if file.closed:
            return
        try:
            file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.close()
            self.events.emit("notice", text="%s is not written any more: %s" % (file.name, error))

    def _ended(self, now: float) -> bool:
        """One step of ending every process: SIGTERM once, SIGKILL after the grace. True when none is left."""
        living = members(self.plan["run"], self.plan["node"])
        if not living:
            return self.status is not None  # else the command is about to be reaped
        if self.ending is None:
            self.ending = now
        patience = self.ending + float(self.plan.get("grace", 10))
        for pid, found in living.items():
            if now >= patience:
                send(pid, found, signal.SIGKILL)
            elif pid not in self._told:
                self._told.add(pid)
                send(pid, found, signal.SIGTERM)
                send(pid, found, signal.SIGCONT)  # a process that was stopped would sleep through the grace
        if now >= patience + STUBBORN:
            self.left = sorted(living)
            return True
        return False

    def _finish(self, child: "subprocess.Popen[bytes]") -> int:
        for line in self._launcher_lines.flush():
            self._line(None, line)
        self._ranks.look()
        self._tell(last=True)
        number = os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else None
        rc = os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else None
        end: Dict[str, Any] = {"rc": rc, "signal": _name(number), "stopped": self.stopped}
        if self.left:
            end["left"] = self.left
        assert child.stdout is not None
        for file in (self._run_log, self._launcher_log, child.stdout):
            with contextlib.suppress(OSError):
                file.close()
        self.events.emit("exit", **end)
        self.events.close(10)
        return 0 if rc == 0 else 1


def _name(number: Optional[int]) -> Optional[str]:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def main(path: str) -> int:
    """Run the plan in the file ``path``."""
    try:
        plan = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.stderr.write("agent: %s: %s\n" % (path, error))
        return 2
    return Supervisor(plan, Path(path).absolute().parent).run()
