"""This machine: runs programs, recognises processes despite reused ids, and kills them; checks what a sandbox needs.

A sandbox needs root, a few programs, and a disk that overlays can write to.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from provision.errors import ClusterctlError, InterruptedByUser, UsageError

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
            if process.alive and not wait_for_end(pidfd, until - time.monotonic()):
                raise ClusterctlError(
                    f"process {process.pid} was killed but does not exit",
                    hint=f"see what it waits for: cat /proc/{process.pid}/stack",
                )
    finally:
        for _, pidfd in opened:
            os.close(pidfd)


def wait_for_end(pidfd: int, seconds: float) -> bool:
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


# --- what a sandbox needs -------------------------------------------------------------------------

# Program to Debian package. util-linux, mount and coreutils are on every Debian, but may be missing in containers.
_ALWAYS = {
    "ip": "iproute2",
    "ssh-keygen": "openssh-client",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "setpriv": "util-linux",
    "pivot_root": "util-linux",
    "mount": "mount",
}
FOR_LINK = {"tc": "iproute2"}
FOR_MINIMAL = {"debootstrap": "debootstrap"}
FOR_HOST = {"sshd": "openssh-server"}
FOR_PASSWORD = {"openssl": "openssl"}

_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN", 27: "CAP_MKNOD"}  # linux/capability.h
_NO_UPPER = {"overlay", "nfs", "nfs4", "cifs", "vfat", "exfat", "fuseblk", "9p", "squashfs", "ecryptfs"}


def require_root(command: str) -> None:
    """Checks the permission to create namespaces, mounts and network devices.

    Raises:
        UsageError: the user is not root, or root lacks capabilities (an ordinary container).
    """
    if os.geteuid() != 0:
        raise UsageError(
            "a sandbox needs root: its nodes are network namespaces and overlay mounts", hint=f"sudo {command}"
        )
    missing = [name for bit, name in _CAPABILITIES.items() if not _capabilities() >> bit & 1]
    if missing:
        raise UsageError(
            f"a sandbox needs {', '.join(missing)}, which root does not have here",
            hint="in a container: start it with --privileged",
        )


def require_programs(*extra: Mapping[str, str]) -> None:
    """Checks that every needed program is installed.

    Args:
        extra: further programs, each with its Debian package.

    Raises:
        UsageError: some are missing; the message names all of them, and the hint installs them.
    """
    path = environment()["PATH"]
    wanted = dict(_ALWAYS)
    for more in extra:
        wanted.update(more)
    missing = {program: package for program, package in wanted.items() if not shutil.which(program, path=path)}
    if not missing:
        return
    packages = " ".join(sorted(set(missing.values())))
    install = f"apt-get install -y {packages}"
    if not shutil.which("apt-get", path=path):
        install = f"install the equivalents of Debian's {packages}"
    are = "are" if len(missing) > 1 else "is"
    raise UsageError(f"{', '.join(missing)} {are} not installed: a sandbox needs the command", hint=install)


def require_upper(storage: Path) -> None:
    """Refuses a folder that cannot store the nodes' disks.

    Raises:
        UsageError: its file system cannot be the upper layer of an overlay, or its path cannot be a mount option.
    """
    check_mountable(storage)
    kind = _file_system(storage)
    if kind in _NO_UPPER:
        raise UsageError(
            f"{storage} is on {kind}, which cannot store the nodes' disks",
            hint="use a folder on a local ext4 or xfs disk, for example CLUSTERCTL_SANDBOX_HOME=/data/sandbox",
        )


def check_mountable(path: Path) -> None:
    """Raises UsageError for a path with a special character in the options of an overlay."""
    if any(character in str(path) for character in ':,\\\n"'):
        raise UsageError(
            f"{path} contains a character that overlay mounts do not accept",
            hint='use a path without : , \\ " and newlines',
        )


def mounts() -> list[tuple[Path, str]]:
    """Every visible mount of this machine, in order: its mount point and file system type."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])  # see proc(5)
        found.append((Path(point), after.split()[0]))
    return found


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return -1  # no such line: let the kernel decide


def _file_system(path: Path) -> str:
    """The file system type of ``path``, which need not exist."""
    there = path.resolve()
    best, kind = Path("/"), ""
    for point, its_kind in mounts():
        if there.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, its_kind
    return kind
