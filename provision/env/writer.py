"""Write a bundle: members one after the other under a temporary name, then the index, then the real name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from provision.env import tar
from provision.env.manifest import FORMAT, Chunk, Manifest, PrefixFiles
from provision.errors import UsageError

INDEX = "clusterctl-bundle"
INDEX_SIZE = 512
MANIFEST = "manifest.json"
MTIME = 315532800  # 1980-01-01: equal environments give equal bundles, but for the time of packing


def member_header(name: str, size: int) -> bytes:
    """The tar header of a member of a bundle."""
    return tar.header(name.encode(), size=size, mtime=MTIME)


def index_member(offset: int, size: int, sha256: str) -> bytes:
    """The first member, header and data, which tells where the manifest's data lie."""
    index = {
        "magic": INDEX,
        "format": FORMAT,
        "manifest_offset": offset,
        "manifest_size": size,
        "manifest_sha256": sha256,
    }
    return member_header(INDEX, INDEX_SIZE) + json.dumps(index).encode("ascii").ljust(INDEX_SIZE)


class Writer:
    """A bundle in the making. ``offset`` is where the next member begins."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset = 0
        self._member(INDEX, [bytes(INDEX_SIZE)])

    def add_chunk(self, chunk: Chunk, blocks: Iterable[bytes]) -> None:
        """Write a chunk; its ``offset`` must be ``next_data``."""
        assert chunk.offset == self.next_data
        self._member(chunk.member, blocks)

    def add_prefix_files(self, blocks: Iterable[bytes]) -> None:
        """Write the member of the files that contain the prefix."""
        self._member(PrefixFiles.member, blocks)

    @property
    def next_data(self) -> int:
        """Where the data of the next member will begin."""
        return self.offset + tar.BLOCK

    def rewind(self, offset: int) -> None:
        """Forget the members from ``offset`` on."""
        self._file.seek(offset)
        self._file.truncate()
        self.offset = offset

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest and the end, then the index into its place at the beginning."""
        data = manifest.to_json()
        offset = self.next_data
        self._member(MANIFEST, [data])
        self._file.write(tar.END)
        self._file.seek(0)
        self._file.write(index_member(offset, len(data), hashlib.sha256(data).hexdigest()))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _member(self, name: str, blocks: Iterable[bytes]) -> None:
        blocks = list(blocks)
        size = sum(map(len, blocks))
        self._file.write(member_header(name, size))
        self._file.writelines(blocks)
        self._file.write(bytes(tar.padding(size)))
        self.offset += tar.BLOCK + size + tar.padding(size)


@contextmanager
def create(out: Path) -> Iterator[Writer]:
    """Write a bundle that appears under its name only when it is whole; nothing stays behind otherwise.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    temporary = out.parent / f".{secrets.token_hex(4)}-{out.name}"
    try:
        with temporary.open("x+b", buffering=1 << 20) as file:
            yield Writer(file)
        temporary.replace(out)
        _sync(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"no space left for {out}: {_free(out.parent)} free in {out.parent}",
                hint="free some space, or write elsewhere with --output",
            ) from error
        if error.filename == str(temporary):
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


def _free(folder: Path) -> str:
    status = os.statvfs(folder)
    return f"{status.f_bavail * status.f_frsize / 1e9:.2f} GB"


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
