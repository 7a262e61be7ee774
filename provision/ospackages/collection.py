"""What is asked for, and what was collected: the nouns between a family and a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from provision.ospackages.releases import Release


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
