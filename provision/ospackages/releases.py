"""The releases of operating systems, and the data between a family of package managers and a bundle."""

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
        version: the part of its ``VERSION_ID`` on which packages depend: ``12``, ``22.04``, ``9``.
        codename: its name in the archive, such as ``bookworm``; empty if archives use the version.
        family: the family of its packages, a key of ``families.FAMILIES``.
    """

    distribution: str
    version: str
    codename: str
    family: str

    @property
    def name(self) -> str:
        """The value for ``--release``, such as ``debian12``."""
        return f"{self.distribution}{self.version}"


RELEASES = (
    Release("debian", "12", "bookworm", "apt"),
    Release("debian", "13", "trixie", "apt"),
    Release("ubuntu", "22.04", "jammy", "apt"),
    Release("ubuntu", "24.04", "noble", "apt"),
)

# Distributions with rpm packages, by the ID in os-release. The minor releases of the first ones share one repository;
# openEuler and Kylin have one for each full version.
_RPM_BY_MAJOR = ("rocky", "almalinux", "rhel", "centos", "ol")
_RPM = (*_RPM_BY_MAJOR, "openeuler", "kylin", "anolis", "fedora", "sles", "opensuse-leap")


def find(name: str) -> Release:
    """The release of that name, even if no family can pack it: see ``families.of``.

    Raises:
        UsageError: it is unknown; the hint lists the known ones.
    """
    wanted = name.strip().lower()
    for release in RELEASES:
        if wanted in (release.name, release.codename):
            return release
    for distribution in _RPM:
        if wanted.startswith(distribution) and (rest := wanted.removeprefix(distribution)):
            return Release(distribution, rest.partition(".")[0] if distribution in _RPM_BY_MAJOR else rest, "", "rpm")
    known = ", ".join(release.name for release in RELEASES)
    raise UsageError(f"unknown release {name}", hint=f"use --release with one of {known}")


@dataclass(frozen=True)
class Mirrors:
    """The sources of packages, and the keys that verify them.

    Attributes:
        main: the archive's address.
        security: the address of its security updates; None to omit them.
        keyring: the file with the archive's public keys.
    """

    main: str
    security: str | None
    keyring: Path


@dataclass(frozen=True)
class Wanted:
    """Requested packages by name, with their release, architecture (in the family's terms) and sources."""

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
        architecture: its architecture, or the family's word for all.
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
    """The requested packages with all their dependencies.

    Attributes:
        packages: the packages, by name.
        paths: the current path of each package's ``file``.
        index: the files that make them a repository, by their paths in a bundle.
    """

    packages: tuple[Package, ...]
    paths: Mapping[str, Path]
    index: Mapping[str, bytes]
