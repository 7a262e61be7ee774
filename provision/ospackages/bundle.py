"""The bundle of OS packages: a plain tar in which every byte follows from the manifest, its first member.

    manifest.json     the list of files, each with its size and sha256, and its own sha256
    Packages Release  the index that makes the folder a repository
    debs/*.deb        the packages, by name

Any tar can unpack it. The reader builds the expected headers and compares them, so every byte is checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from provision.env.bundle import tar
from provision.env.packing.temporary import create_file
from provision.errors import BundleError, UsageError, shown_value
from provision.ospackages.releases import Collected, Package, Wanted
from trainer.agent.contract.untrusted import UntrustedError, parse_object

SUFFIX = ".osb"
MANIFEST = "manifest.json"

MTIME = 315532800  # 1980-01-01: equal packages give equal bundles
_BLOCK = 1 << 20
_SIZE = slice(124, 136)  # of a tar header


@dataclass(frozen=True)
class OsBundle:
    """A complete and intact bundle.

    Attributes:
        path: the file.
        manifest: its manifest.
        size: bytes of the file.
        sha256: of the file.
    """

    path: Path
    manifest: Manifest
    size: int
    sha256: str


def write(out: Path, wanted: Wanted, collected: Collected) -> OsBundle:
    """Write a bundle, which gets its name when it is complete.

    Raises:
        UsageError: the folder is not writable, or its disk is full.
        BundleError: a package differs from the archive's index.
    """
    index = [Member(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in collected.index.items()]
    described = describe(wanted, collected, index)
    data = described.to_json()
    digest, size = hashlib.sha256(), 0
    with create_file(out) as file:

        def put(block: bytes) -> None:
            nonlocal size
            file.write(block)
            digest.update(block)
            size += len(block)

        _member(put, MANIFEST, data)
        for name, content in collected.index.items():
            _member(put, name, content)
        for package in described.packages:
            put(_header(package.file, package.size))
            _copy(collected.paths[package.file], Member(package.file, package.size, package.sha256), put)
            put(bytes(tar.padding(package.size)))
        put(tar.END)
    return OsBundle(out, described, size, digest.hexdigest())


def open_bundle(path: Path) -> OsBundle:
    """Read and check a whole bundle.

    Raises:
        UsageError: the file cannot be read.
        BundleError: it is not a bundle of OS packages, truncated, damaged, or has another format.
    """
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {(error.strerror or str(error)).lower()}",
            hint=f"on a machine with a network: clusterctl pack-os --release debian12 -o {path}",
        ) from error


class _Reader:
    """One pass over a file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0

    def read(self) -> OsBundle:
        head = self._file.read(tar.BLOCK)
        number = head[_SIZE].rstrip(b"\0 ")
        length = int(number, 8) if number.isdigit() and not number.strip(b"01234567") else LARGEST
        if length >= LARGEST or head != _header(MANIFEST, length):
            raise BundleError(
                f"{self._path} is not a bundle of OS packages",
                hint="to create one: clusterctl pack-os --release debian12",
            )
        self._count(head)
        try:
            found = parse(b"".join(self._take(length, MANIFEST)))
        except BundleError as error:
            raise BundleError(f"{self._path}: {error}", hint=error.hint) from error
        self._expect(bytes(tar.padding(length)), MANIFEST)
        for member in found.members:
            self._expect(_header(member.name, member.size), member.name)
            digest = hashlib.sha256()
            for block in self._take(member.size, member.name):
                digest.update(block)
            if digest.hexdigest() != member.sha256:
                raise self._damaged(member.name)
            self._expect(bytes(tar.padding(member.size)), member.name)
        self._expect(tar.END, "its end")
        if self._file.read(1):
            raise BundleError(f"{self._path} has data after its end", hint="copy it again")
        return OsBundle(self._path, found, self._size, self._digest.hexdigest())

    def _take(self, size: int, name: str) -> Iterator[bytes]:
        while size:
            block = self._file.read(min(size, _BLOCK))
            if not block:
                raise BundleError(
                    f"{self._path} is truncated: it ends at byte {self._size}, in {name}", hint="copy it again"
                )
            self._count(block)
            size -= len(block)
            yield block

    def _expect(self, wanted: bytes, name: str) -> None:
        if b"".join(self._take(len(wanted), name)) != wanted:
            raise self._damaged(name)

    def _count(self, block: bytes) -> None:
        self._digest.update(block)
        self._size += len(block)

    def _damaged(self, name: str) -> BundleError:
        return BundleError(f"{self._path} is damaged: {name} differs from the manifest", hint="copy it again")


def _header(name: str, size: int) -> bytes:
    return tar.header(name.encode(), size=size, mtime=MTIME)


def _member(put: Callable[[bytes], None], name: str, data: bytes) -> None:
    put(_header(name, len(data)) + data + bytes(tar.padding(len(data))))


def _copy(path: Path, member: Member, put: Callable[[bytes], None]) -> None:
    """Copy a package, and check again that it matches the signed index."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
            put(block)
    if (size, digest.hexdigest()) != (member.size, member.sha256):
        raise BundleError(f"{path} changed while it was packed", hint="run the same command again")


FORMAT = "clusterctl-os-packages"
VERSION = 2

# Nodes unpack the bundle as root: only plain names in known folders.
_PLACE = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_][A-Za-z0-9_.+~%:-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
LARGEST = 64 << 20  # bytes of a manifest
_DEPTH = 3  # the manifest, a list, a package
INDEX = ("Packages", "Release")
# These become arguments of apt, which runs as root: none may look like an option or a pattern, or contain spaces.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,199}(?::[a-z0-9-]{1,40})?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~^:_-]{0,254}")
_PACKAGE = re.compile(r"debs/[A-Za-z0-9_][A-Za-z0-9_.+~%:-]{0,249}\.deb")


@dataclass(frozen=True)
class Member:
    """A file of the bundle."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a bundle.

    Attributes:
        release: the release's name, such as ``debian12``.
        family: the kind of package manager, such as ``apt``.
        architecture: the family's name for it.
        requested: the packages that the user requested; the others are their dependencies.
        packages: all packages, sorted by name.
        index: the files that make the folder a repository.
    """

    release: str
    family: str
    architecture: str
    requested: tuple[str, ...]
    packages: tuple[Package, ...]
    index: tuple[Member, ...]

    @property
    def members(self) -> tuple[Member, ...]:
        """Every file after the manifest, in order."""
        return (*self.index, *(Member(each.file, each.size, each.sha256) for each in self.packages))

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the requested packages."""
        known = {each.name: each.version for each in self.packages}
        return {name: known.get(name, "") for name in self.requested}

    def to_json(self) -> bytes:
        """The member's bytes; equal manifests have equal ones. ``sha256`` is the digest of everything before it."""
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return _encode(data | {"sha256": digest_of(data)})


def digest_of(data: Mapping[str, Any]) -> str:
    """The sha256 of a manifest's other keys, in their order, encoded like the manifest itself."""
    return hashlib.sha256(_encode({key: value for key, value in data.items() if key != "sha256"})).hexdigest()


def _encode(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def describe(wanted: Wanted, collected: Collected, index: Iterable[Member]) -> Manifest:
    """The manifest of collected packages."""
    release = wanted.release
    requested = tuple(sorted(set(wanted.packages)))
    return Manifest(release.name, release.family, wanted.architecture, requested, collected.packages, tuple(index))


def parse(data: bytes) -> Manifest:
    """Parse and check a manifest.

    Raises:
        BundleError: it is not a manifest, has another format, or is invalid or damaged.
    """
    try:
        found = parse_object(data, limit=LARGEST, depth=_DEPTH)
    except UntrustedError as error:
        raise BundleError(f"its manifest cannot be read: it {error}") from error
    if found.get("format") != FORMAT:
        raise BundleError(
            "it is not a bundle of OS packages", hint="to create one: clusterctl pack-os --release debian12"
        )
    if found.get("version") != VERSION:
        raise BundleError(
            f"it has format {shown_value(found.get('version'))}; this clusterctl reads format {VERSION} only",
            hint="pack it again, or use the version of clusterctl that packed it",
        )
    try:
        manifest = Manifest(
            release=_read_pattern(_NAME, found, "release"),
            family=_read_pattern(_NAME, found, "family"),
            architecture=_read_pattern(_NAME, found, "architecture"),
            requested=tuple(
                _read_pattern(_NAME, {"requested": name}, "requested") for name in _list(found, "requested")
            ),
            packages=tuple(_package(each) for each in _list(found, "packages")),
            index=tuple(_index(each) for each in _list(found, "index")),
        )
    except (KeyError, TypeError, ValueError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"its manifest is not valid: {why}") from error
    names = [member.name for member in manifest.members]
    if len(set(names)) != len(names):
        raise BundleError("its manifest is not valid: a file is listed twice")
    if manifest.to_json() != data:
        raise BundleError("its manifest is damaged: it differs from its sha256", hint="copy the bundle again")
    return manifest


def _package(found: Any) -> Package:
    return Package(
        name=_read_pattern(_NAME, found, "name"),
        version=_read_pattern(_VERSION, found, "version"),
        architecture=_read_pattern(_NAME, found, "architecture"),
        file=_read_pattern(_PACKAGE, found, "file"),
        size=_size(found["size"]),
        sha256=_digest(found["sha256"]),
    )


def _index(found: Any) -> Member:
    name = check_path(found["name"])
    if name not in INDEX:
        raise ValueError(f"the index contains {shown_value(name)}")
    return Member(name, _size(found["size"]), _digest(found["sha256"]))


def _list(found: Mapping[str, Any], key: str) -> list[Any]:
    value = found[key]
    if not isinstance(value, list):
        raise TypeError(f"{key} is not a list")
    return value


def _read_pattern(pattern: re.Pattern[str], found: Mapping[str, Any], key: str) -> str:
    value = found[key]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{key}: {shown_value(value)} is not a name")
    return value


def check_path(value: Any) -> str:
    """Check that a value is a plain path in a bundle, and return it.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or not _PLACE.fullmatch(value):
        raise ValueError(f"{shown_value(value)} is not a path in a bundle")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise ValueError(f"{shown_value(value)} is not a size")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{shown_value(value)} is not a sha256")
    return value
