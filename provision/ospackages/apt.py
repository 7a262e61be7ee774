"""Packages of Debian and Ubuntu: an apt with separate folders and settings resolves and fetches them.

It needs ``apt-get`` of any release, and no root. It changes nothing on the machine, and uses only the network settings
of the machine's own apt.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from provision.errors import UsageError
from provision.model import Emit, Progress
from provision.ospackages import apt_output
from provision.ospackages.releases import Collected, Mirrors, Package, Release, Wanted
from provision.stages import stage

STAGE = "os packages"


class Apt:
    """See ``families.Family``."""

    templates = "services/os_packages/apt"

    def mirrors(
        self,
        release: Release,
        architecture: str,
        *,
        main: str | None,
        security: str | None,
        keyring: Path | None,
        own: Mapping[str, str],
    ) -> Mirrors:
        """See ``families.Family.mirrors``."""
        found = mirrors(release, architecture, main=main, security=security, keyring=keyring, own=own)
        if not found.keyring.is_file():
            known = archive(release, architecture)
            raise UsageError(
                f"{found.keyring} is missing: it is needed to verify the packages of {release.name}",
                hint="--keyring FILE" + ("" if keyring else f", or apt-get install {known.keyring_package}"),
            )
        return found

    def collect(self, wanted: Wanted, cache: Path, emit: Emit) -> Collected:
        """See ``families.Family.collect``."""
        if not shutil.which("apt-get"):
            raise UsageError(
                f"packages of {wanted.release.name} are collected with apt-get, which is not installed here",
                hint="on a machine with Debian or Ubuntu (any release): clusterctl pack-os",
            )
        folder = cache.absolute() / f"{wanted.release.name}-{wanted.architecture}"
        with _alone(folder):
            return _collect(wanted, folder, emit)


def _collect(wanted: Wanted, folder: Path, emit: Emit) -> Collected:
    title = f"Reading {wanted.mirrors.main} for {wanted.release.name}"
    with stage(emit, STAGE, title, unit="steps") as shown:
        known = _solve(wanted, folder)
        _fetch(wanted, folder, tuple(known), emit)
        packages = tuple(sorted(known, key=lambda each: each.name))
        index = apt_output.packages_file(known.items())
        shown.summary = f"{len(packages)} packages"
    return Collected(
        packages,
        {each.file: _fetched(folder, each) for each in packages},
        {"Packages": index, "Release": apt_output.release_file(wanted.release.name, wanted.architecture, index)},
    )


def _solve(wanted: Wanted, folder: Path) -> dict[Package, apt_output.Stanza]:
    """The packages that apt would install, with their index entries."""
    _write_settings(wanted, folder)
    updated = _apt(folder, "apt-get", "update")
    if updated.returncode:
        raise apt_output.unreachable(wanted, updated.stderr)
    solved = _apt(folder, "apt-get", "--simulate", "install", *wanted.packages)
    if solved.returncode:
        raise apt_output.unsolved(wanted, solved.stdout + solved.stderr)
    versions = dict(apt_output.installed(solved.stdout))
    chosen = [f"{name}={version}" for name, version in versions.items()]
    shown = _apt(folder, "apt-cache", "--no-all-versions", "show", *chosen)
    known = {apt_output.package(stanza): stanza for stanza in apt_output.stanzas(shown.stdout)}
    if virtual := [name for name in wanted.packages if name not in versions]:
        raise apt_output.virtual(wanted, virtual, apt_output.providers(known.values(), virtual))
    assert versions == {each.name: each.version for each in known}, "apt-cache did not show what apt-get had chosen"
    return known


def _fetch(wanted: Wanted, folder: Path, packages: tuple[Package, ...], emit: Emit) -> None:
    """Fetch missing packages into ``archives``; apt compares them with the signed index.

    Of existing files apt compares only the size, so their digests are compared here.
    """
    missing = 0
    for each in packages:
        path = _fetched(folder, each)
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != each.sha256:
            path.unlink()
        missing += not path.is_file()
    emit(Progress(STAGE, 0, missing, note=f"fetching {missing} of {len(packages)} packages"))
    result = _apt(folder, "apt-get", "--yes", "--download-only", "install", *wanted.packages)
    if result.returncode:
        raise apt_output.unsolved(wanted, result.stdout + result.stderr)
    _apt(folder, "apt-get", "autoclean")  # deletes versions that the mirror no longer has


def _fetched(folder: Path, package: Package) -> Path:
    """The path of a package in apt's cache, where a colon in its version is percent-encoded."""
    version = package.version.replace(":", "%3a")
    return folder / "archives" / f"{package.name}_{version}_{package.architecture}.deb"


def _write_settings(wanted: Wanted, folder: Path) -> None:
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("", encoding="utf-8")
    dump = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False).stdout
    network = network_settings(dump)
    text = configuration(folder, wanted.architecture, network)
    settings = folder / "apt.conf"
    settings.touch(mode=0o600)  # a proxy's address may hold a password
    settings.write_text(text, encoding="utf-8")
    (folder / "sources.list").write_text(sources(wanted), encoding="utf-8")


def _apt(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [argv[0], "--quiet=2", *argv[1:]] if argv[0] == "apt-cache" else [argv[0], "--quiet", *argv[1:]],
        env={**os.environ, "LC_ALL": "C", "APT_CONFIG": str(folder / "apt.conf")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder: one process at a time collects packages for a release."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


SCHEMES = ("http://", "https://", "file:", "copy:")


@dataclass(frozen=True)
class Archive:
    """A distribution's archive, as in the sources.list(5) of its installer."""

    main: str
    security: str
    components: tuple[str, ...]
    keyring: str
    keyring_package: str


_DEBIAN = Archive(
    main="http://deb.debian.org/debian",
    security="http://deb.debian.org/debian-security",
    components=("main",),
    keyring="/usr/share/keyrings/debian-archive-keyring.gpg",
    keyring_package="debian-archive-keyring",
)
_UBUNTU = Archive(
    main="http://archive.ubuntu.com/ubuntu",
    security="http://security.ubuntu.com/ubuntu",
    components=("main", "universe"),  # infiniband-diags and opensm are in universe
    keyring="/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    keyring_package="ubuntu-keyring",  # of this name in Ubuntu, and in Debian from 13 on
)
_PORTS = "http://ports.ubuntu.com/ubuntu-ports"  # of Ubuntu, all but PCs


def archive(release: Release, architecture: str) -> Archive:
    """The public archive of a release of Debian or Ubuntu."""
    if release.distribution == "debian":
        return _DEBIAN
    if architecture in ("amd64", "i386"):
        return _UBUNTU
    return Archive(_PORTS, _PORTS, _UBUNTU.components, _UBUNTU.keyring, _UBUNTU.keyring_package)


def security_beside(main: str) -> str | None:
    """The security updates of a Debian mirror, by convention in ``debian-security``."""
    head, _, last = main.rstrip("/").rpartition("/")
    return f"{head}/debian-security" if last == "debian" else None


def address(given: str) -> str:
    """An address for apt. ``file:`` becomes ``copy:``, so that packages are copied to the cache like fetched ones.

    Raises:
        UsageError: it is not a valid address.
    """
    if not given.startswith(SCHEMES) or re.search(r"[\s\[\]]", given):
        raise UsageError(
            f"{given!r} is not a mirror's address", hint="such as http://mirror.example/debian or file:/srv/debian"
        )
    return re.sub(r"^file:", "copy:", given.rstrip("/"))


def sources(wanted: Wanted) -> str:
    """The sources.list of a release with its updates; every archive must be signed with a key of the keyring."""
    release, mirrors = wanted.release, wanted.mirrors
    components = " ".join(archive(release, wanted.architecture).components)
    places = [(mirrors.main, release.codename), (mirrors.main, f"{release.codename}-updates")]
    if mirrors.security:
        places.append((mirrors.security, f"{release.codename}-security"))
    return "".join(f"deb [signed-by={mirrors.keyring}] {uri} {suite} {components}\n" for uri, suite in places)


def configuration(folder: Path, architecture: str, network: Iterable[str]) -> str:
    """An apt.conf for ``$APT_CONFIG``, which is read first and excludes the machine's other settings.

    Args:
        folder: the folder for everything that this apt writes.
        architecture: the packages' architecture.
        network: the lines of ``apt-config dump`` to keep, see ``network_settings``.
    """
    settings = {
        # An empty status: no dependency is omitted because this machine has it, so the bundle suits a minimal node.
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "Dir::Log": folder,
        "Dir::Etc::main": "/dev/null",
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::trusted": "/dev/null",
        "Dir::Etc::trustedparts": "/dev/null",
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Get::Always-Include-Phased-Updates": "true",  # Ubuntu: else each machine decides at random
        "APT::Update::Error-Mode": "any",  # a list that could not be fetched is an error, not a warning
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",  # seconds
        "Acquire::https::Timeout": "20",
    }
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    return "\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};', *network, ""])


# Settings of the machine's apt to keep: network access (proxies, certificates, bandwidth), and the check of dates.
_KEPT = re.compile(
    r"^Acquire::(?!IndexTargets|Languages|AllowInsecure|AllowWeak|AllowDowngrade|cdrom)[\w:.-]+ \".+\";$"
)


def network_settings(dump: str) -> tuple[str, ...]:
    """The lines of ``apt-config dump`` with this machine's network settings."""
    return tuple(line for line in dump.splitlines() if _KEPT.match(line))


def mirrors(
    release: Release,
    architecture: str,
    *,
    main: str | None,
    security: str | None,
    keyring: Path | None,
    own: Mapping[str, str],
) -> Mirrors:
    """See ``families.Family.mirrors``.

    Raises:
        UsageError: an invalid address, or no known address of security updates.
    """
    known = archive(release, architecture)
    usual = own.get(release.codename) or known.main
    first = address(main or usual)
    if security == "none":
        second = None
    elif security:
        second = address(security)
    elif main and release.distribution == "debian":
        second = security_beside(first)
        if second is None:
            raise UsageError(
                f"the address of security updates is not known for {main}",
                hint="--security-mirror URL, or --security-mirror none to omit them",
            )
    elif main:
        second = first  # Ubuntu's mirrors have it with the rest
    else:
        second = address(own.get(f"{release.codename}-security") or known.security)
    return Mirrors(first, second, keyring or Path(known.keyring))
