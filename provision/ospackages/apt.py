"""The family of Debian and Ubuntu: an apt with folders of its own solves and fetches.

It needs ``apt-get`` on the machine, of any release; no rights of root, and nothing of the machine is changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from provision.errors import UsageError
from provision.model import Emit, Progress
from provision.ospackages import apt_config, apt_index, apt_said
from provision.ospackages.collection import Collected, Mirrors, Package, Wanted
from provision.ospackages.releases import Release
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
        found = apt_config.mirrors(release, architecture, main=main, security=security, keyring=keyring, own=own)
        if not found.keyring.is_file():
            known = apt_config.archive(release, architecture)
            raise UsageError(
                f"{found.keyring} is missing: without it nothing proves that packages of {release.name} are the "
                "archive's own",
                hint="--keyring FILE" + ("" if keyring else f", or apt-get install {known.keyring_package}"),
            )
        return found

    def collect(self, wanted: Wanted, cache: Path, emit: Emit) -> Collected:
        """See ``families.Family.collect``."""
        if not shutil.which("apt-get"):
            raise UsageError(
                f"packages of {wanted.release.name} are collected by apt-get, which this machine lacks",
                hint="on a machine with Debian or Ubuntu, of any release: clusterctl pack-os",
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
        index = apt_index.packages_file(known.items())
        shown.summary = f"{len(packages)} packages"
    return Collected(
        packages,
        {each.file: _fetched(folder, each) for each in packages},
        {"Packages": index, "Release": apt_index.release_file(wanted.release.name, wanted.architecture, index)},
    )


def _solve(wanted: Wanted, folder: Path) -> dict[Package, apt_index.Stanza]:
    """The packages that apt would install, with their stanzas."""
    _write_settings(wanted, folder)
    updated = _apt(folder, "apt-get", "update")
    if updated.returncode:
        raise apt_said.unreachable(wanted, updated.stderr)
    solved = _apt(folder, "apt-get", "--simulate", "install", *wanted.packages)
    if solved.returncode:
        raise apt_said.unsolved(wanted, solved.stdout + solved.stderr)
    versions = dict(apt_said.installed(solved.stdout))
    chosen = [f"{name}={version}" for name, version in versions.items()]
    shown = _apt(folder, "apt-cache", "--no-all-versions", "show", *chosen)
    known = {apt_index.package(stanza): stanza for stanza in apt_index.stanzas(shown.stdout)}
    if virtual := [name for name in wanted.packages if name not in versions]:
        raise apt_said.virtual(wanted, virtual, apt_index.providers(known.values(), virtual))
    assert versions == {each.name: each.version for each in known}, "apt-cache did not show what apt-get had chosen"
    return known


def _fetch(wanted: Wanted, folder: Path, packages: tuple[Package, ...], emit: Emit) -> None:
    """Bring what is not there yet into ``archives``; apt compares what it fetches with the signed index.

    Of what lies there already it only looks at the size, so that is compared here.
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
        raise apt_said.unsolved(wanted, result.stdout + result.stderr)
    _apt(folder, "apt-get", "autoclean")  # of older versions, which the mirror has no more


def _fetched(folder: Path, package: Package) -> Path:
    """Where apt puts a package: with a colon of its version written as in addresses."""
    version = package.version.replace(":", "%3a")
    return folder / "archives" / f"{package.name}_{version}_{package.architecture}.deb"


def _write_settings(wanted: Wanted, folder: Path) -> None:
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("", encoding="utf-8")
    dump = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False).stdout
    network = apt_config.network_settings(dump)
    text = apt_config.configuration(folder, wanted.architecture, network)
    settings = folder / "apt.conf"
    settings.touch(mode=0o600)  # a proxy's address may hold a password
    settings.write_text(text, encoding="utf-8")
    (folder / "sources.list").write_text(apt_config.sources(wanted), encoding="utf-8")


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
    """Of two processes that collect for one release, one waits."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
