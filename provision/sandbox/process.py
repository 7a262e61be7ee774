"""Processes of this machine: run a program to its end, recognise one after its id may have been reused, end it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from provision.errors import ClusterctlError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEADLINE = 30.0  # seconds that the kernel gets to end a killed process; reached only when one hangs in it


@dataclass(frozen=True)
class Process:
    """A process that can be told from a later one with the same id.

    ``started`` is the start time in clock ticks since boot: field 22 of ``/proc/PID/stat``, see proc(5).
    """

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return _stat(self.pid) == (self.started, True)


def identify(pid: int) -> Process | None:
    """The process that has ``pid`` now, None when there is none."""
    stat = _stat(pid)
    return Process(pid, stat[0]) if stat else None


def boot_id() -> str:
    """Differs after every start of the machine: process ids and start times mean nothing across it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def environment() -> dict[str, str]:
    """Our environment for system programs: ``sbin`` in PATH, and messages in English."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}", "LC_ALL": "C"}


def run(*argv: str, stdin: str = "") -> str:
    """What a program prints on stdout.

    Raises:
        ClusterctlError: it failed; the message holds what it wrote on stderr.
    """
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise ClusterctlError(f"{' '.join(argv)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()}")
    return done.stdout


# What pidfd_open says of a process that has ended; newer kernels (seen with 6.18) know no file of one that just has.
GONE = (ProcessLookupError, FileNotFoundError)


def kill(processes: Sequence[Process]) -> None:
    """Ends processes by SIGKILL and waits until they are gone; one whose id means another process is left alone.

    Raises:
        ClusterctlError: one of them does not end.
    """
    opened: list[tuple[Process, int]] = []
    try:
        for process in processes:
            with suppress(*GONE):
                opened.append((process, os.pidfd_open(process.pid)))
                # Only now the comparison holds: what the descriptor means cannot change any more.
                if process.alive:
                    signal.pidfd_send_signal(opened[-1][1], signal.SIGKILL)
        until = time.monotonic() + _DEADLINE
        for process, pidfd in opened:
            if process.alive and not ended(pidfd, until - time.monotonic()):
                raise ClusterctlError(
                    f"process {process.pid} does not end, although it was killed",
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
            with suppress(OSError):  # it has ended since the listing
                yield int(entry), Path("/proc", entry, "cmdline").read_bytes()


def _stat(pid: int) -> tuple[int, bool] | None:
    """Start time, and whether it is more than a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the program's name before it may hold anything
    return int(fields[19]), fields[0] not in "ZX"
