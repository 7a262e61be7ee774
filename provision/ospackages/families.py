"""Families of package managers: an object that collects packages, and the sh templates that install them.

apt is the only one. To add another one (rpm: Rocky, openEuler, Kylin), write an object that implements ``Family``, and
add its name to ``FAMILIES`` and its releases to ``releases.RELEASES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from provision.errors import BundleError, UsageError
from provision.model import Emit
from provision.ospackages.apt import Apt
from provision.ospackages.releases import RELEASES, Collected, Mirrors, Release, Wanted


class Family(Protocol):
    """A package manager, on the connected machine and on a node."""

    @property
    def templates(self) -> str:
        """The folder below ``templates/`` with the scripts for a node."""
        ...

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
        """The sources of the packages of a release.

        Args:
            release: a release of this family.
            architecture: the architecture, in the family's terms.
            main: the archive's address, if given.
            security: the address of its security updates, if given; ``none`` omits them.
            keyring: the file with the archive's public keys, if given.
            own: the archives of this machine's own apt, by suite, such as ``bookworm-security``.

        Raises:
            UsageError: an invalid address, or no keyring; the hint names its package.
        """
        ...

    def collect(self, wanted: Wanted, cache: Path, emit: Emit) -> Collected:
        """Fetch packages with all their dependencies, regardless of the packages on this machine.

        Args:
            wanted: the packages and their release and sources.
            cache: a folder for lists and packages, kept between calls.
            emit: receives progress.

        Raises:
            UsageError: a package does not exist, an archive has no valid signature, or a mirror fails.
        """
        ...


FAMILIES: Mapping[str, Family] = {"apt": Apt()}


def of(release: Release) -> Family:
    """The family of a release.

    Raises:
        UsageError: it is not supported.
    """
    if release.family in FAMILIES:
        return FAMILIES[release.family]
    known = ", ".join(each.name for each in RELEASES)
    raise UsageError(
        f"{release.name} has {release.family} packages, which this version of clusterctl cannot pack",
        hint=f"it packs {known}; copy the packages of {release.name} to the nodes by hand",
    )


def find_family(family: str) -> Family:
    """The family of that name, from a bundle.

    Raises:
        BundleError: it is not supported.
    """
    if family not in FAMILIES:
        raise BundleError(
            f"this version of clusterctl cannot install {family} packages",
            hint="use the clusterctl that packed them",
        )
    return FAMILIES[family]
