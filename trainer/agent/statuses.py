"""Lets one connection show the whole cluster: a run's agents answer ``status``, each for its own node.

``agent statuses plan.json`` makes a named pipe in the node's folder of the run and sends SIGUSR2 to the agent. The
agent asks all others (``status?``). Each runs ``status.sh``, which ``train`` wrote into the run's folder, and sends its
output. A question carries no command, so no node can make another one run anything. The agent writes the answers to
the pipe, and ``agent statuses`` prints them (``contract/statuses.py``).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from .account import usable_time
from .contract.statuses import ANSWER, ENCODED, LARGEST, PATIENCE, QUESTION, SCRIPT
from .processes import Stat, read, send
from .run_files import NodePlan, read_state, running_agents
from .saves import catches

ASKED = 4  # pipes that are answered at a time
_PIPE = ".statuses."


class Statuses:
    """An agent's part. All methods are called by the supervisor's main thread, and none waits."""

    def __init__(self, plan: NodePlan, send_message: Callable[..., None]) -> None:
        """``send_message`` sends to the other agents; see ``Link.send``."""
        self._plan = plan
        self._send = send_message
        self._nodes = plan.data.link.nodes if plan.data.link else (plan.node,)
        self._pipes: Dict[int, _Pipe] = {}
        self._number = 0
        self._answering: Dict[int, int] = {}  # the positions that asked, and the numbers of their questions
        self._lock = threading.Lock()

    def asked_here(self) -> None:
        """Ask all agents for every new pipe. Pipes without a reader are deleted."""
        self._pipes = {number: pipe for number, pipe in self._pipes.items() if not pipe.over}
        for path in sorted(self._plan.logs.glob(_PIPE + "*"))[:ASKED]:
            if len(self._pipes) >= ASKED or any(pipe.path == path for pipe in self._pipes.values()):
                continue
            descriptor = _open(path)
            if descriptor is None:
                continue
            self._number += 1
            pipe = self._pipes[self._number] = _Pipe(path, descriptor, len(self._nodes))
            self._answer(self._plan.rank, self._number, own=pipe)
            if len(self._nodes) > 1:
                self._send(QUESTION, number=self._number)

    def asked(self, position: int, number: int) -> None:
        """Answer a question of the agent at a position, if the run has such a node."""
        if position < len(self._nodes):
            self._answer(position, number)

    def take(self, node: str, number: int, message: Dict[str, Any]) -> None:
        """Pass on another agent's answer to a question of this one. Values of a wrong type are ignored."""
        pipe, out = self._pipes.get(number), message.get("out")
        if pipe is not None and isinstance(out, str) and len(out) <= ENCODED and out.isascii():
            taken, given = (usable_time(message.get(key)) or 0.0 for key in ("taken", "given"))
            pipe.put(node, out, taken, given)

    def _answer(self, position: int, number: int, own: "Optional[_Pipe]" = None) -> None:
        """Run the script in a thread, unless it runs for the same agent."""
        with self._lock:
            busy = position in self._answering
            self._answering[position] = number
        if not busy:
            taken = time.time()
            threading.Thread(target=self._run, args=(position, taken, own), name="status", daemon=True).start()

    def _run(self, position: int, taken: float, own: "Optional[_Pipe]") -> None:
        try:
            out = output_of(self._plan.folder / SCRIPT)
        finally:
            with self._lock:
                number = self._answering.pop(position)
        if out is None:
            return
        if own is not None:
            own.put(self._plan.node, out, own.sent, own.sent)
        else:
            self._send(ANSWER, to=position, number=number, out=out, taken=taken, given=time.time())


class _Pipe:
    """A pipe to ``agent statuses``, and the thread that writes to it."""

    def __init__(self, path: Path, descriptor: int, nodes: int) -> None:
        self.path = path
        self.over = False
        self.sent = time.time()
        self._seen: Dict[str, bool] = {}
        self._left = nodes
        self._lines: "queue.Queue[Optional[bytes]]" = queue.Queue()
        self._lines.put(_line({"nodes": nodes}))
        threading.Thread(target=self._write, args=(descriptor,), name="statuses", daemon=True).start()

    def put(self, node: str, out: str, taken: float, given: float) -> None:
        """Write one node's answer, the first one."""
        if node in self._seen or self.over:
            return
        self._seen[node] = True
        answer = {"node": node, "out": out, "sent": self.sent, "taken": taken, "given": given}
        self._lines.put(_line(dict(answer, received=max(self.sent, time.time()))))
        if len(self._seen) == self._left:
            self._lines.put(None)

    def _write(self, descriptor: int) -> None:
        until = time.monotonic() + 2 * PATIENCE
        try:
            while time.monotonic() < until:
                try:
                    line = self._lines.get(timeout=1.0)
                except queue.Empty:
                    continue
                if line is None:
                    return
                view = memoryview(line)
                while view:  # the reader ends after PATIENCE, and then this fails
                    view = view[os.write(descriptor, view) :]
        except OSError:  # the reader is gone
            pass
        finally:
            self.over = True
            os.close(descriptor)


def output_of(script: Path, patience: float = PATIENCE) -> Optional[str]:
    """The output of a shell script, compressed and encoded; None if it is empty, too long or too late."""
    try:
        child = subprocess.Popen(
            ["/bin/sh", str(script)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return None
    assert child.stdout is not None
    found = bytearray()
    until = time.monotonic() + patience
    complete = False
    ready = select.poll()  # the agent of a thousand nodes has too many descriptors for select()
    ready.register(child.stdout, select.POLLIN)
    try:
        while len(found) <= LARGEST and time.monotonic() < until:
            if ready.poll(1e3 * max(0.0, until - time.monotonic())):
                data = os.read(child.stdout.fileno(), 1 << 16)
                found += data
                if not data:
                    complete = True
                    break
    finally:
        if not complete:
            child.kill()
        child.stdout.close()
        child.wait()
    if not complete or not 0 < len(found) <= LARGEST:
        return None
    text = base64.b64encode(zlib.compress(bytes(found), 1)).decode()
    return text if len(text) <= ENCODED else None


def statuses(plan: NodePlan, patience: float) -> int:
    """Ask the agent on this node for the answers of all, and print them. Returns 1 if no agent can be asked."""
    state = read_state(plan.logs)
    agents = [(pid, start) for pid, start in running_agents(state) if pid == state.get("pid")]
    # An agent that does not catch the signal yet would die of it.
    if not agents or not catches(read("/proc/%d/status" % agents[0][0])):
        sys.stderr.write("agent: no agent of run %s can be asked here\n" % plan.run)
        return 1
    path = plan.logs / (_PIPE + str(os.getpid()))
    with contextlib.suppress(FileNotFoundError):  # of a killed process with this pid
        path.unlink()
    os.mkfifo(str(path), 0o600)
    reader = -1
    try:
        # Also for writing: a pipe without a writer would always be ready, with an end of file.
        reader = os.open(str(path), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        for pid, start in agents:
            send(pid, Stat("", 0, start), signal.SIGUSR2)
        return 0 if _print_all(reader, time.monotonic() + patience) else 1
    finally:
        path.unlink()
        if reader >= 0:
            os.close(reader)


def _print_all(reader: int, until: float) -> int:
    """Print the lines of the pipe until all nodes have answered. Returns how many lines there were."""
    buffer = bytearray()
    lines, nodes = 0, 0
    while (not nodes or lines <= nodes) and time.monotonic() < until:
        if not select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
            break
        buffer += os.read(reader, 1 << 16)
        *complete, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for line in complete:
            if not lines:
                nodes = int(json.loads(line.decode())["nodes"])
            lines += 1
            sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()
    return lines


def _open(path: Path) -> Optional[int]:
    """Open a pipe for writing; None if nothing reads it, or it is no pipe of this user."""
    try:
        found = path.lstat()
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid not in (0, os.getuid()):
            return None
        descriptor = os.open(str(path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # its reader was killed
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    os.set_blocking(descriptor, True)
    return descriptor


def _line(content: Dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
