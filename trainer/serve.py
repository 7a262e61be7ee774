"""Runs a program that serves a port of this node, for as long as the caller is connected.

``clusterctl tunnel`` sends this file's text to a node's Python: ``python -I -c TEXT`` (3.8, the standard library only).
The first line of stdin is a JSON object, and later lines are signs of life. The program and all its descendants end
when stdin ends, when no line arrives for ``SILENCE`` seconds, or on SIGTERM, SIGHUP or SIGINT. So nothing is left if
the caller is killed or its network breaks.

The object: ``commands`` (lists of words; the first whose program exists starts), ``env`` and ``unset`` (changes to the
environment), ``port`` (0: a free one), ``patience`` (seconds until the port must be open). ``{port}`` in a word or a
value becomes the port.

Lines of stdout start with ``@serve``; every other line is the program's output:

=====================  ==========================================================
``missing``            no command's program exists
``taken PORT``         another program uses the port
``started INDEX PORT`` the command was started
``ready``              the port is open
``ready exposed``      the same, and other machines can reach it
``late``               the port is not open after ``patience`` seconds
``ended CODE``         the program and its descendants have ended
=====================  ==========================================================
"""

import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Dict, List, Set

SILENCE = 60.0  # seconds without a line on stdin
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LOOK = 0.2  # seconds between looks at the port: no system call waits until another process listens
_LIMIT = 1 << 20  # bytes of the first line
_SUBREAPER, _PDEATHSIG = 36, 1  # of prctl(2)
_HOST = "127.0.0.1"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")  # little-endian


class _Stop(Exception):  # noqa: N818 - not an error
    """The program must end now."""


def say(*words: object) -> None:
    """Write a line to the caller, who may have gone."""
    with suppress(OSError):
        os.write(1, ("@serve " + " ".join(map(str, words)) + "\n").encode())


def read_line() -> Dict[str, Any]:
    """The object in the first line of stdin; read byte by byte, so that nothing after it is buffered."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(line) > _LIMIT:
            raise SystemExit("stdin ended before its first line")
        line += byte
    found: Dict[str, Any] = json.loads(line)
    return found


def free_port(port: int) -> int:
    """The port if no process listens on it, or a free one for 0.

    Raises:
        OSError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((_HOST, port))
        chosen: int = probe.getsockname()[1]
        return chosen


def is_open(port: int) -> bool:
    """Whether a process listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((_HOST, port)) == 0


def start(words: List[str], env: Dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start the program in its own session. It gets SIGTERM if this process is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before() -> None:
        libc.prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # its orphans become children of this process, so `end` finds all of them
    return subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=before,  # noqa: PLW1509 - there is only one thread
    )


def descendants() -> Set[int]:
    """All processes below this one, from field 4 of /proc/PID/stat (proc(5)); without zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has exited
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(path.parent.name)] = int(parent)
    found = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found - {os.getpid()}
        found |= more


def end(wake: int) -> None:
    """End every descendant: SIGTERM, and SIGKILL for those that are left after ``GRACE``."""
    until = time.monotonic() + GRACE
    number, sent = signal.SIGTERM, set()  # type: Any, Set[int]
    while True:
        pids = descendants()
        if not pids:
            return
        if time.monotonic() > until:
            number, sent = signal.SIGKILL, set()
        for pid in pids - sent:
            with suppress(OSError):  # it has exited
                os.kill(pid, number)
        sent |= pids
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        select.select([wake], [], [], LOOK)  # a child that exits wakes it, a grandchild does not
        with suppress(BlockingIOError):
            os.read(wake, 4096)


def is_exposed(port: int) -> bool:
    """Whether a process listens on the port at another address than loopback: see proc_pid_net(5)."""
    for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for line in path.read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                address, _, number = words[1].partition(":")
                if int(number, 16) == port and words[3] == "0A" and address not in _LOOPBACK:
                    return True
    return False


def follow(child: "subprocess.Popen[bytes]", port: int, patience: float, wake: int) -> int:
    """Wait for the end of the program; report when its port is open.

    Raises:
        _Stop: stdin ended, or was silent for too long.
    """
    heard = started = time.monotonic()
    waiting = True
    while True:
        code = child.poll()
        if code is not None:
            return code
        if waiting and is_open(port):
            waiting = False
            say("ready", *(["exposed"] if is_exposed(port) else []))
        elif waiting and time.monotonic() - started > patience:
            say("late")
            raise _Stop
        ready, _, _ = select.select([0, wake], [], [], LOOK if waiting else SILENCE / 4)
        if wake in ready:
            os.read(wake, 4096)  # of SIGCHLD
        if 0 in ready:
            if not os.read(0, 4096):
                raise _Stop
            heard = time.monotonic()
        if time.monotonic() - heard > SILENCE:
            raise _Stop


def stop(_number: int, _frame: Any) -> None:
    """A signal ends the program."""
    raise _Stop


def main() -> int:
    """Start the first command that exists, and follow it."""
    given = read_line()
    try:
        port = free_port(given["port"])
    except OSError:
        say("taken", given["port"])
        return 3

    def fill(text: str) -> str:
        return text.replace("{port}", str(port))

    env = {name: value for name, value in os.environ.items() if name not in given["unset"]}
    env.update({name: fill(value) for name, value in given["env"].items()})
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes select when the program ends
    code = "3"
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, stop)
        for index, words in enumerate(given["commands"]):
            program = shutil.which(words[0], path=env.get("PATH"))
            if program:
                say("started", index, port)
                child = start([program, *map(fill, words[1:])], env)
                code = str(follow(child, port, given["patience"], wake))
                break
        else:
            say("missing")
    except _Stop:
        code = "by the caller"
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        end(wake)
    say("ended", code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
