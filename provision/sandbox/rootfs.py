"""The root that nodes share read-only: a small Debian, made once and kept, or this machine's own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from provision.errors import ClusterctlError
from provision.model import Emit, Progress, ignore
from provision.sandbox import mirror
from provision.sandbox.process import environment
from provision.stages import stage

STAGE = "rootfs"
# debootstrap's minbase has tar, gzip, coreutils, perl-base and util-linux; no Python, zstd or rsync.
_PACKAGES = ("openssh-client", "openssh-server")
# Files that each machine must have for itself, or that a node does not need.
_REMOVE = (
    "etc/ssh/ssh_host_*",
    "etc/machine-id",
    "var/cache/apt/archives/*.deb",
    "var/lib/apt/lists/*_*",
    "var/log/*.log",
)


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the content of a minimal root; the mirror does not."""

    suite: str
    architecture: str
    packages: tuple[str, ...]
    variant: str = "minbase"
    version: int = 1  # increased when ``_build`` changes

    @property
    def digest(self) -> str:
        """The first 12 hex digits of the sha256 of the recipe: the root's name in the cache."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def recipe(packages: Sequence[str] = ()) -> Recipe:
    """The recipe of a minimal root with additional Debian ``packages``."""
    return Recipe(mirror.suite(), platform.machine(), tuple(sorted({*_PACKAGES, *packages})))


def cache() -> Path:
    """The cache of minimal roots: ``$XDG_CACHE_HOME/clusterctl/rootfs`` or ``/var/cache/clusterctl/rootfs``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "/var/cache").absolute() / "clusterctl" / "rootfs"


def cached(wanted: Recipe) -> Path | None:
    """The cached root of this recipe; None if it must be built."""
    path = cache() / wanted.digest
    return path if path.is_dir() else None


def minimal(wanted: Recipe, emit: Emit = ignore) -> Path:
    """A minimal root, from the cache or built now (about half a minute and 240 MB).

    It gets its name when it is complete. If two processes need the same root, one builds it and the other waits.

    Raises:
        ClusterctlError: debootstrap failed.
    """
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{wanted.digest}.lock"):
        ready = cached(wanted)
        if ready:
            return ready
        for leftover in folder.glob(f".{wanted.digest}-*"):  # from a killed process, which no longer holds the lock
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".{wanted.digest}-", dir=folder))
        try:
            root = work / "root"
            _build(wanted, root, emit)
            root.rename(folder / wanted.digest)
        finally:
            shutil.rmtree(work)
    return folder / wanted.digest


def _build(wanted: Recipe, root: Path, emit: Emit) -> None:
    source = mirror.mirror(wanted.suite)
    title = f"Building the nodes' root: Debian {wanted.suite} from {source}"
    with stage(emit, STAGE, title, unit="steps") as shown:
        debootstrap = ["debootstrap", f"--variant={wanted.variant}", f"--include={','.join(wanted.packages)}"]
        _debootstrap([*debootstrap, wanted.suite, str(root), source], emit)
        for pattern in _REMOVE:
            for path in root.glob(pattern):
                path.unlink()
        root.chmod(0o755)
        shown.summary = f"{wanted.suite}, cached in {cache() / wanted.digest}"


def _debootstrap(argv: Sequence[str], emit: Emit) -> None:
    # debootstrap creates mounts and starts daemons' scripts in the new root. In separate namespaces they cannot outlive
    # it. If this process is killed, debootstrap (--pdeathsig) and its children (--kill-child) are killed too.
    alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount-proc", "--pid", "--fork", "--kill-child", *argv]
    printed: list[str] = []
    process = subprocess.Popen(
        alone,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment(), **mirror.proxy()},
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with process.stdout as lines:
        try:
            for line in lines:
                printed.append(line.strip())
                emit(Progress(STAGE, len(printed), note=printed[-1].removeprefix("I: ")))
        except BaseException:
            process.kill()
            lines.read()  # until its last child exits: they write into the folder to be removed
            raise
        finally:
            process.wait()
    if process.returncode:
        trouble = (
            [line for line in printed if not line.startswith("I: ")] or printed or [f"exit code {process.returncode}"]
        )
        raise ClusterctlError(
            f"{' '.join(argv)} failed: {'; '.join(trouble[-3:])}",
            hint="set CLUSTERCTL_DEBIAN_MIRROR=http://… to a mirror that works, or use --rootfs host",
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
