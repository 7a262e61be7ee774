"""Starts the ranks of one node, forwards their output, and leaves no process behind.

The first line of stdin is the task, as JSON. The end of stdin stops everything, because the controller has exited:

===========  =================================================================================================
``ranks``    global ranks of this node's processes, in the order of their local ranks
``world``    number of processes on all nodes
``master``   address of rank 0's node; ``port``: the port of rank 0's store
``env``      set for the processes, in addition to the few inherited variables
``unset``    variables that are not inherited
``timeout``  seconds that an operation may take, and that a node may be silent
``work``     what ``measure`` does
===========  =================================================================================================

Each line of stdout is a JSON object with the key ``event``: the events of ``measure``, and

``network``  a line of NCCL's log that names its network: ``rank``, ``text``
``failed``   a failed rank: ``rank``, ``why``, ``log`` (its last lines)
``end``      the last event: ``ok``
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO, Any, Deque, Dict, List, Optional, Tuple

KEPT = ("HOME", "USER", "LOGNAME", "PATH", "TZ", "TMPDIR", "CLUSTERCTL_RUN", "CLUSTERCTL_NODE")
KEPT_PREFIXES = ("NCCL_", "CUDA_", "NVIDIA_", "UCX_")  # variables that a site sets for its machines
LAST_LINES = 40
GRACE = 3.0  # seconds for the other ranks to report why they fail as well
# NCCL's log lines about its networks at INFO: "NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket",
# "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0".
NETWORK = re.compile(r"NCCL INFO .*(NET/|Using network| via )")
NETWORK_LINES = 300  # per rank: two for each channel and peer

Message = Tuple[str, int, Any]


def environment(spec: Dict[str, Any], local: int, inherited: Dict[str, str]) -> Dict[str, str]:
    """Return the environment of a rank."""
    env = {name: value for name, value in inherited.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    env.update(spec["env"])
    for name in spec.get("unset", []):
        env.pop(name, None)
    env.update(
        RANK=str(spec["ranks"][local]),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(spec["world"]),
        MASTER_ADDR=spec["master"],
        MASTER_PORT=str(spec["port"]),
    )
    return env


class Ranks:
    """The processes of one node. ``run`` starts and stops them."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self.spec = spec
        self.ok = True
        self._messages: "queue.Queue[Message]" = queue.Queue()
        self._children: Dict[int, "subprocess.Popen[bytes]"] = {}
        self._logs: Dict[int, Deque[str]] = {}
        self._errors: Dict[int, str] = {}
        self._network_lines: Dict[int, int] = {}

    def run(self) -> int:
        """Start the ranks, forward their output, and kill them all at the end."""
        self._listen(sys.stdin.buffer, "gone", -1)
        try:
            for local, rank in enumerate(self.spec["ranks"]):
                self._start(local, rank)
            self._follow()
        finally:
            for child in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal.SIGKILL)
                child.wait()
        emit("end", ok=self.ok)
        return 0 if self.ok else 1

    def _start(self, local: int, rank: int) -> None:
        events, theirs = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).parent), "rank", str(theirs)],
            env=environment(self.spec, local, dict(os.environ)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self._children[rank] = child
        self._logs[rank] = deque(maxlen=LAST_LINES)
        assert child.stdin is not None
        assert child.stdout is not None
        # The pipe stays open: its end shows a rank that this process has exited.
        child.stdin.write(json.dumps(dict(self.spec["work"], timeout=self.spec["timeout"])).encode() + b"\n")
        child.stdin.flush()
        log = self._listen(child.stdout, "log", rank)
        self._listen(os.fdopen(events, "rb"), "event", rank, log)

    def _listen(
        self, stream: IO[bytes], kind: str, rank: int, log: Optional[threading.Thread] = None
    ) -> threading.Thread:
        """Read lines in a thread. The end of a rank's events is its exit, reported after its ``log`` is read."""

        def read() -> None:
            for line in stream:
                if kind != "gone":
                    self._messages.put((kind, rank, line.decode("utf-8", "replace").rstrip("\n")))
            if kind == "event":
                status = self._children[rank].wait()
                if log is not None:
                    log.join(GRACE)  # a child process that it left behind may hold the pipe
                self._messages.put(("exit", rank, status))
            elif kind == "gone":
                self._messages.put(("gone", rank, None))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def _follow(self) -> None:
        """Handle messages until every rank has exited. The first failure stops the others after ``GRACE``."""
        running = set(self._children)
        while running:
            try:
                kind, rank, what = self._messages.get(timeout=GRACE if not self.ok else self.spec["timeout"] + 30)
            except queue.Empty:
                if self.ok:
                    for each in sorted(running):
                        self._fail(each, "no output for %d s" % (self.spec["timeout"] + 30))
                return
            if kind == "gone":
                self.ok = False
                return
            if kind == "log":
                self._log(rank, what)
            elif kind == "event":
                self._event(rank, json.loads(what))
            else:
                running.discard(rank)
                if what != 0:
                    self._fail(rank, self._errors.get(rank) or describe_exit(what))

    def _log(self, rank: int, line: str) -> None:
        self._logs[rank].append(line)
        if NETWORK.search(line) and self._network_lines.setdefault(rank, 0) < NETWORK_LINES:
            self._network_lines[rank] += 1
            emit("network", rank=rank, text=line)

    def _event(self, rank: int, event: Dict[str, Any]) -> None:
        if event["event"] == "error":
            self._errors[rank] = event["text"]
        elif event["event"] != "alive":
            emit(**event)

    def _fail(self, rank: int, why: str) -> None:
        self.ok = False
        emit("failed", rank=rank, why=why, log=list(self._logs[rank]))


def describe_exit(status: int) -> str:
    """Describe the exit of a process that reported no reason."""
    if status >= 0:
        return "exited with code %d" % status
    try:
        return "killed by %s" % signal.Signals(-status).name
    except ValueError:
        return "killed by signal %d" % -status


def emit(event: str, **fields: Any) -> None:
    """Write an event for the controller."""
    with contextlib.suppress(BrokenPipeError):  # the controller has exited, which the end of stdin shows too
        sys.stdout.write(json.dumps(dict(fields, event=event)) + "\n")
        sys.stdout.flush()


def main(argv: List[str]) -> int:
    """Start the ranks of this node, or run as one of them."""
    if argv[:1] == ["rank"]:
        from measure import main as measure  # noqa: PLC0415 - it imports torch, which the parent does not need

        return int(measure(int(argv[1])))
    return Ranks(json.loads(sys.stdin.buffer.readline())).run()


if __name__ == "__main__":
    # Not sys.exit: a thread that reads stdin holds its lock, which makes the interpreter's shutdown fail.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
