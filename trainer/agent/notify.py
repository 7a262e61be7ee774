"""Runs the user's command (``--notify``) when something happens to a run.

The supervisor starts ``agent notify`` for each event and does not wait for it: a command that hangs delays nothing, and
one for the end of a run outlives the agent. That process runs the command with a time limit, a few times if it fails,
and writes failures to ``agent.log``.

The command receives the event as JSON on stdin and in variables. It does not get ``CLUSTERCTL_RUN``: every process with
this variable belongs to the run and ends with it. The shell reads the command from a pipe, because all users of a node
can read a process's arguments.

The end of a run and its restarts are reported by rank 0's node; if its agent is lost, by the node of rank 1. Other
events are reported by the node that notices them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, Dict, List, Mapping, Optional

from .contract.untrusted import UntrustedError, parse_object
from .processes import reap
from .run_files import NodePlan

RESTART = "restart"  # values of ``kind`` of a notice that is reported
DISK_FULL = "disk_full"
SLOWDOWN = "slowdown"
MOST = 20  # events of a run on a node, besides its end
TEXT = 2000  # characters of a text
LIMIT = 1 << 16  # bytes of an event
TRIES = 3
PATIENCE = 30.0  # seconds for the command
PAUSE = 10.0  # seconds before the second try, twice as many before the third
_KEPT = 2000  # bytes of the command's stderr
_INHERITED = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TZ", "TMPDIR", "LANG")


class Notifier:
    """Reports the events of a run. ``stands_in``: this node reports the end instead of rank 0's."""

    def __init__(self, plan: NodePlan) -> None:
        self.stands_in = False
        self._plan = plan
        self._count = 0
        self._children: List[int] = []

    def take(self, record: Mapping[str, Any]) -> None:
        """Take an event of ``events.jsonl``, and report it if the user wants to know it."""
        event = notification(self._plan, record, stands_in=self.stands_in) if self._plan.data.notify else None
        if event is None or (self._count >= MOST and record["event"] != "end"):
            return
        self._count += 1
        self._children = [pid for pid in self._children if reap(pid) is None]
        flags = "-IB" if sys.dont_write_bytecode else "-I"
        argv = [sys.executable, flags, str(Path(__file__).absolute().parent), "notify", str(self._plan.path)]
        try:
            child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, cwd="/"
            )
        except OSError as error:
            sys.stderr.write("notify %s: %s\n" % (event["event"], error))
            return
        self._children.append(child.pid)
        child.returncode = 0  # Popen must not wait for it: it may outlive this process
        _send(child.stdin, event)


def notification(plan: NodePlan, record: Mapping[str, Any], *, stands_in: bool = False) -> Optional[Dict[str, Any]]:
    """The event that this node reports for an event of ``events.jsonl``; None if it reports none."""
    kind = _kind(record)
    if kind is None or (kind in ("end", "failure", RESTART) and plan.rank and not stands_in):
        return None
    why = record.get("why") or {}
    return {
        "event": kind,
        "run": plan.run,
        "node": why.get("node") or record.get("node") or plan.node,
        "rank": why.get("rank") if why else record.get("rank"),
        "state": record.get("state"),
        "step": record.get("step"),
        "attempt": record.get("attempt"),
        "text": str(why.get("text") or record.get("text") or record.get("state") or "")[:TEXT],
        "time": record.get("time"),
    }


def _kind(record: Mapping[str, Any]) -> Optional[str]:
    event = record["event"]
    if event == "end":
        return "failure" if record["state"] == "failed" else "end"
    if event == "notice" and record.get("kind") in (RESTART, DISK_FULL, SLOWDOWN):
        return str(record["kind"])
    if event == "straggler":
        return SLOWDOWN if record["state"] == "slow" else None
    return "hang" if event == "hang" else None


def deliver(plan: NodePlan, data: bytes) -> int:
    """Run the command for an event until it succeeds, at most ``TRIES`` times. Returns the exit code."""
    try:
        event = parse_object(data)
    except UntrustedError as error:
        sys.stderr.write("notify: the event %s\n" % error)
        return 2
    for number in range(TRIES):
        time.sleep(PAUSE * number)
        problem = run_command(plan.data.notify or "", event, plan.cwd)
        if problem is None:
            return 0
        sys.stderr.write("notify %s, try %d of %d: %s\n" % (event.get("event"), number + 1, TRIES, problem))
        sys.stderr.flush()
    return 1


def variables(event: Mapping[str, Any]) -> Dict[str, str]:
    """The event as environment variables; what an event does not have is empty."""
    found = {"CLUSTERCTL_EVENT": str(event.get("event"))}
    for key in ("run", "node", "rank", "state", "step", "attempt", "text", "time"):
        value = event.get(key)
        found["CLUSTERCTL_EVENT_" + key.upper()] = "" if value is None else _plain(str(value))
    return found


def run_command(command: str, event: Mapping[str, Any], cwd: Path, patience: float = PATIENCE) -> Optional[str]:
    """Run the command once. Returns the reason of a failure, with the start of its stderr."""
    env = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
    script, writer = os.pipe()
    with os.fdopen(writer, "wb") as file:
        file.write(command.encode("utf-8", "surrogateescape") + b"\n")
    try:
        child = subprocess.Popen(
            ["/bin/sh", "/dev/fd/%d" % script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**env, **variables(event)},
            cwd=str(cwd) if cwd.is_dir() else "/",
            pass_fds=(script,),
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    finally:
        os.close(script)
    kept = bytearray()
    reader = threading.Thread(target=_drain, args=(child.stderr, kept), daemon=True)
    reader.start()
    _send(child.stdin, event)
    try:
        code = child.wait(patience)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return "took longer than %g s" % patience
    reader.join(1.0)  # a process in the background may hold the pipe open
    words = bytes(kept).decode("utf-8", "replace").strip()
    return None if code == 0 else "exited with code %d%s" % (code, words and ": " + words)


def _send(pipe: Optional[IO[bytes]], event: Mapping[str, Any]) -> None:
    """Write the event, which fits into the pipe's buffer, and close the pipe."""
    assert pipe is not None
    with contextlib.suppress(OSError), pipe:  # the process does not read it
        pipe.write(json.dumps(event, sort_keys=True).encode() + b"\n")


def _drain(pipe: IO[bytes], kept: bytearray) -> None:
    """Read to the end, and keep the start."""
    with contextlib.suppress(OSError), pipe:
        for part in iter(lambda: os.read(pipe.fileno(), 4096), b""):
            kept.extend(part[: _KEPT - len(kept)])


def _plain(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")
