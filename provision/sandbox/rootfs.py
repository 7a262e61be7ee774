"""The root that nodes share read-only: a small Debian, made once and kept, or this machine's own.

The Debian release and the mirror of its packages come from this machine's apt.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from provision.errors import ClusterctlError
from provision.model import Emit, Progress, ignore
from provision.sandbox.host import environment, run
from provision.stages import stage

_DEFAULT_SUITE = "bookworm"
_DEFAULT_MIRROR = "http://deb.debian.org/debian"
_SCHEMES = ("http://", "https://", "file:")


@dataclass(frozen=True)
class AptSource:
    """An archive from which apt fetches binary packages."""

    uri: str
    suites: tuple[str, ...]


def debian_suite(os_release: Path = Path("/etc/os-release")) -> str:
    """The Debian release of the nodes: this machine's, or bookworm if it does not run Debian."""
    try:
        text = os_release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _DEFAULT_SUITE
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    return fields.get("VERSION_CODENAME") or _DEFAULT_SUITE if fields.get("ID") == "debian" else _DEFAULT_SUITE


def debian_mirror(wanted: str, folder: Path = Path("/etc/apt")) -> str:
    """The mirror of Debian's ``wanted`` suite: ``$CLUSTERCTL_DEBIAN_MIRROR``, apt's, or deb.debian.org."""
    override = os.environ.get("CLUSTERCTL_DEBIAN_MIRROR")
    if override:
        return override
    usable = (source.uri for source in apt_sources(folder) if wanted in source.suites)
    return next((uri.rstrip("/") for uri in usable if uri.startswith(_SCHEMES)), _DEFAULT_MIRROR)


def apt_proxy() -> Mapping[str, str]:
    """The environment variables with apt's proxy for debootstrap. Empty if apt has none or the environment sets one."""
    if not shutil.which("apt-config"):
        return {}
    found = re.findall(r"^(\w+)='(.*)'$", run("apt-config", "shell", *_PROXY_QUERY), re.MULTILINE)
    return {name: value for name, value in found if name not in os.environ and value != "DIRECT"}


_PROXY_QUERY = ("http_proxy", "Acquire::http::Proxy", "https_proxy", "Acquire::https::Proxy")


def parse_sources(name: str, text: str) -> list[AptSource]:
    """The binary sources in a file of ``sources.list.d``, in either format (see sources.list(5))."""
    return list(_deb822(text) if name.endswith(".sources") else _one_line(text))


def apt_sources(folder: Path = Path("/etc/apt")) -> Iterator[AptSource]:
    """The archives of this machine's apt, in its order."""
    parts = folder / "sources.list.d"
    files = [folder / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]
    for path in files:
        if path.is_file():
            yield from parse_sources(path.name, path.read_text(encoding="utf-8", errors="replace"))


def _one_line(text: str) -> Iterator[AptSource]:
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[[^\]]*\]\s*)?(\S+)\s+(\S+)", line)
        if match:
            yield AptSource(match[1], (match[2],))


def _deb822(text: str) -> Iterator[AptSource]:
    without_comments = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    for stanza in re.split(r"\n\s*\n", without_comments):
        pairs = re.findall(r"^([\w-]+):((?:.*\n?)(?:[ \t].*\n?)*)", stanza, re.MULTILINE)
        fields = {key.lower(): value.split() for key, value in pairs}
        if "deb" in fields.get("types", ()) and fields.get("enabled") != ["no"]:
            for uri in fields.get("uris", ()):
                yield AptSource(uri, tuple(fields.get("suites", ())))


# --- the root -------------------------------------------------------------------------------------

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
    return Recipe(debian_suite(), platform.machine(), tuple(sorted({*_PACKAGES, *packages})))


def cache() -> Path:
    """The cache of minimal roots: ``$XDG_CACHE_HOME/clusterctl/rootfs`` or ``/var/cache/clusterctl/rootfs``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "/var/cache").absolute() / "clusterctl" / "rootfs"


def find_cached(wanted: Recipe) -> Path | None:
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
        ready = find_cached(wanted)
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
    source = debian_mirror(wanted.suite)
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
        env={**environment(), **apt_proxy()},
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
