"""The bundle of OS packages: a plain tar in which every byte follows from the manifest, its first member.

    manifest.json     the list of files, each with its size and sha256, and its own sha256
    Packages Release  the index that makes the folder a repository
    debs/*.deb        the packages, by name

Any tar can unpack it. The reader builds the expected headers and compares them, so every byte is checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from provision.env.bundle import tar
from provision.env.packing.temporary import create_file
from provision.errors import BundleError, UsageError
from provision.ospackages import manifest
from provision.ospackages.collection import Collected, Wanted
from provision.ospackages.manifest import Manifest, Member

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
    described = manifest.describe(wanted, collected, index)
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
        length = int(number, 8) if number.isdigit() and not number.strip(b"01234567") else manifest.LARGEST
        if length >= manifest.LARGEST or head != _header(MANIFEST, length):
            raise BundleError(
                f"{self._path} is not a bundle of OS packages",
                hint="to create one: clusterctl pack-os --release debian12",
            )
        self._count(head)
        try:
            found = manifest.parse(b"".join(self._take(length, MANIFEST)))
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
