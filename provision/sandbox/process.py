"""Processes of this machine: runs programs, recognises processes despite reused ids, and kills them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from provision.errors import ClusterctlError, InterruptedByUser

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEADLINE = 30.0  # seconds for a killed process to exit; reached only if it hangs in the kernel


@dataclass(frozen=True)
class Process:
    """A process, distinguishable from a later one with the same id.

    ``started`` is the start time in clock ticks since boot: field 22 of ``/proc/PID/stat``, see proc(5).
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this process is still running; a zombie is not."""
        return _stat(self.pid) == (self.started, True)


def identify(pid: int) -> Process | None:
    """The process that has ``pid`` now; None if there is none."""
    stat = _stat(pid)
    return Process(pid, stat[0]) if stat else None


def boot_id() -> str:
    """The id of the machine's boot: process ids and start times are valid only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def environment() -> dict[str, str]:
    """The environment for system programs: ``sbin`` in PATH, and messages in English."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}", "LC_ALL": "C"}


def run(*argv: str, stdin: str = "") -> str:
    """Runs a program and returns its stdout.

    Raises:
        ClusterctlError: it failed; the message contains its stderr.
    """
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise ClusterctlError(f"{' '.join(argv)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
    return done.stdout


# The errors of pidfd_open for a process that exited; newer kernels (6.18) report a missing file if it has just exited.
GONE = (ProcessLookupError, FileNotFoundError)


def kill(processes: Sequence[Process]) -> None:
    """Sends SIGKILL to processes and waits until they exit; skips a process whose id was reused.

    Raises:
        ClusterctlError: one of them does not exit.
    """
    opened: list[tuple[Process, int]] = []
    try:
        for process in processes:
            with suppress(*GONE):
                opened.append((process, os.pidfd_open(process.pid)))
                # Compared after opening the descriptor, which then always means the same process.
                if process.alive:
                    signal.pidfd_send_signal(opened[-1][1], signal.SIGKILL)
        until = time.monotonic() + _DEADLINE
        for process, pidfd in opened:
            if process.alive and not ended(pidfd, until - time.monotonic()):
                raise ClusterctlError(
                    f"process {process.pid} was killed but does not exit",
                    hint=f"see what it waits for: cat /proc/{process.pid}/stack",
                )
    finally:
        for _, pidfd in opened:
            os.close(pidfd)


def ended(pidfd: int, seconds: float) -> bool:
    """Whether the process behind ``pidfd`` ends within ``seconds``."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def with_argv(wanted: Sequence[tuple[str, ...]]) -> list[Process]:
    """Every process whose whole command line is one of ``wanted``."""
    lines = {"\0".join(argv).encode() + b"\0" for argv in wanted}
    return [process for pid, line in _command_lines() if line in lines and (process := identify(pid))]


def _command_lines() -> Iterator[tuple[int, bytes]]:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are wanted, 10,000 Path objects are not
        if entry.isdigit():
            with suppress(OSError):  # it exited after the listing
                yield int(entry), Path("/proc", entry, "cmdline").read_bytes()


def _stat(pid: int) -> tuple[int, bool] | None:
    """The start time, and whether the process is running rather than a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the program's name before it may hold anything
    return int(fields[19]), fields[0] not in "ZX"


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], object] | int


@contextmanager
def interruptible() -> Iterator[None]:
    """In this block the first SIGINT, SIGTERM or SIGHUP raises InterruptedByUser, and later ones are ignored.

    By default, SIGTERM would end the process without a cleanup. Only the main thread can set handlers; in other threads
    the block changes nothing.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # the cleanup follows
        raise InterruptedByUser(f"interrupted by {signal.Signals(number).name}")

    with _handlers(interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In this block SIGINT, SIGTERM and SIGHUP are ignored, so that a cleanup is complete."""
    with _handlers(signal.SIG_IGN):
        yield


@contextmanager
def _handlers(handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that was not set from Python, and cannot be restored.
    before = {each: old for each in _SIGNALS if (old := signal.getsignal(each)) is not None}
    try:
        for each, old in before.items():
            if old is not signal.SIG_IGN:  # the parent process, such as nohup, wants it ignored
                signal.signal(each, handler)
        yield
    finally:
        for each, old in before.items():
            signal.signal(each, old)
