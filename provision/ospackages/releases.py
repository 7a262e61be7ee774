"""The releases of operating systems, by the names that people and ``/etc/os-release`` give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.errors import UsageError


@dataclass(frozen=True)
class Release:
    """One release of a distribution.

    Attributes:
        distribution: the ``ID`` of os-release(5): ``debian``, ``ubuntu``, ``rocky``.
        version: its ``VERSION_ID``, as far as packages depend on it: ``12``, ``22.04``, ``9``.
        codename: what its archive calls it: ``bookworm``; empty where archives go by the version.
        family: who knows its packages, a key of ``families.FAMILIES``.
    """

    distribution: str
    version: str
    codename: str
    family: str

    @property
    def name(self) -> str:
        """What ``--release`` takes, such as ``debian12``."""
        return f"{self.distribution}{self.version}"


RELEASES = (
    Release("debian", "12", "bookworm", "apt"),
    Release("debian", "13", "trixie", "apt"),
    Release("ubuntu", "22.04", "jammy", "apt"),
    Release("ubuntu", "24.04", "noble", "apt"),
)

# Distributions whose packages are rpms, by the ID of their os-release. Of the first ones all minor releases share one
# repository; openEuler's and Kylin's are told apart by their whole version.
_RPM_BY_MAJOR = ("rocky", "almalinux", "rhel", "centos", "ol")
_RPM = (*_RPM_BY_MAJOR, "openeuler", "kylin", "anolis", "fedora", "sles", "opensuse-leap")


def find(name: str) -> Release:
    """The release of that name. One that no family can pack yet is a release all the same: see ``families.of``.

    Raises:
        UsageError: nobody knows it; the message lists those that are known.
    """
    wanted = name.strip().lower()
    for release in RELEASES:
        if wanted in (release.name, release.codename):
            return release
    for distribution in _RPM:
        if wanted.startswith(distribution) and (rest := wanted.removeprefix(distribution)):
            return Release(distribution, _rpm_version(distribution, rest), "", "rpm")
    known = ", ".join(release.name for release in RELEASES)
    raise UsageError(f"{name} is no release that clusterctl knows", hint=f"--release with one of {known}")


def _rpm_version(distribution: str, version: str) -> str:
    return version.partition(".")[0] if distribution in _RPM_BY_MAJOR else version


@dataclass(frozen=True)
class Mirrors:
    """Where packages come from, and whose signature proves them.

    Attributes:
        main: the archive's address.
        security: that of its security updates; None: do without.
        keyring: the file with the archive's public keys.
    """

    main: str
    security: str | None
    keyring: Path


@dataclass(frozen=True)
class Wanted:
    """Packages by name, and the release and architecture (as the family calls it) that they are for."""

    release: Release
    architecture: str
    packages: tuple[str, ...]
    mirrors: Mirrors


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
        name: its name.
        version: its version, as the family compares it.
        architecture: its own, which may stand for all.
        file: its path in a bundle.
        size: bytes.
        sha256: hex digits, from an index whose signature was verified.
    """

    name: str
    version: str
    architecture: str
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Collected:
    """A closure: nothing in it depends on a package that is not in it.

    Attributes:
        packages: by name.
        paths: where each package's ``file`` lies now.
        index: files that make them a repository, by their paths in a bundle.
    """

    packages: tuple[Package, ...]
    paths: Mapping[str, Path]
    index: Mapping[str, bytes]
