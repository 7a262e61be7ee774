"""Checks this machine for a sandbox: root, a few programs, and a disk that overlays can write to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from provision.errors import UsageError
from provision.sandbox.process import environment

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
