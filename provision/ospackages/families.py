"""Where a family of package managers plugs in: an object that collects packages, and the sh that installs them.

There is one today, apt's. Another one (rpm: Rocky, openEuler, Kylin) is an object that fits ``Family``, its name in
``FAMILIES`` and its releases in ``releases.RELEASES``; nothing else knows how packages are found or installed.
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
        """The folder below ``templates/`` with ``present``, ``install`` and ``remove``, the sh for a node."""
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
        """Where the packages of a release are fetched.

        Args:
            release: one of this family.
            architecture: as the family calls it.
            main: the archive's address, if it was named.
            security: that of its security updates, if it was named; ``none``: do without.
            keyring: the archive's public keys, if they were named.
            own: the archive that this machine itself uses for a suite, such as ``bookworm-security``.

        Raises:
            UsageError: an address that is none, or no keyring; the hint tells the package that has it.
        """
        ...

    def collect(self, wanted: Wanted, cache: Path, emit: Emit) -> Collected:
        """Find and fetch packages with all that they depend on, whatever this machine has itself.

        Args:
            wanted: what, for which release, from where.
            cache: a folder for lists and packages, kept between calls.
            emit: is told about the progress.

        Raises:
            UsageError: no such package, no signature that proves the archive, or a mirror that fails; it is named.
        """
        ...


FAMILIES: Mapping[str, Family] = {"apt": Apt()}


def of(release: Release) -> Family:
    """The family of a release.

    Raises:
        UsageError: this version has none for it.
    """
    if release.family in FAMILIES:
        return FAMILIES[release.family]
    known = ", ".join(each.name for each in RELEASES)
    raise UsageError(
        f"{release.name} has {release.family} packages, and this version of clusterctl packs none of that family",
        hint=f"it packs {known}; for {release.name}, bring the packages to the nodes by hand",
    )


def named(family: str) -> Family:
    """The family that a bundle names.

    Raises:
        BundleError: this version has none of that name.
    """
    if family not in FAMILIES:
        raise BundleError(
            f"this version of clusterctl installs no {family} packages", hint="use the clusterctl that packed them"
        )
    return FAMILIES[family]
