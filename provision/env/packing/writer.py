"""Write a bundle: members one after the other, and at last the index into its place at the beginning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from provision.env.bundle import tar
from provision.env.bundle.manifest import FORMAT, Chunk, Manifest, PrefixFiles
from provision.env.bundle.parse import LIMIT
from provision.env.packing import output
from provision.errors import BundleError

INDEX = "clusterctl-bundle"
INDEX_SIZE = 512
MANIFEST = "manifest.json"
MTIME = 315532800  # 1980-01-01: equal environments give equal bundles, but for the time of packing


def member_header(name: str, size: int) -> bytes:
    """The tar header of a member of a bundle."""
    return tar.header(name.encode(), size=size, mtime=MTIME)


def index_member(offset: int, size: int, sha256: str, split: int = 0) -> bytes:
    """The first member, header and data, which tells where the manifest's data lie, and how long the slices are."""
    index = {
        "magic": INDEX,
        "format": FORMAT,
        "manifest_offset": offset,
        "manifest_size": size,
        "manifest_sha256": sha256,
        "split": split,
    }
    return member_header(INDEX, INDEX_SIZE) + json.dumps(index).encode("ascii").ljust(INDEX_SIZE)


class Writer:
    """A bundle in the making."""

    def __init__(self, out: output.Output, split: int) -> None:
        self._out = out
        self._split = split
        self._member(INDEX, bytes(INDEX_SIZE))

    @property
    def next_data(self) -> int:
        """Where the data of the next member will begin."""
        return self._out.size + tar.BLOCK

    def add_chunk(self, chunk: Chunk) -> list[output.Piece]:
        """Write what is around a chunk's data, which somebody else writes: where. ``offset`` must be ``next_data``."""
        assert chunk.offset == self.next_data
        self._out.write(member_header(chunk.member, chunk.compressed))
        pieces = self._out.reserve(chunk.compressed)
        self._out.write(bytes(tar.padding(chunk.compressed)))
        return pieces

    def add_prefix_files(self, blocks: Iterable[bytes]) -> None:
        """Write the member of the files that contain the prefix; its size is known when all blocks are."""
        begin = self._out.size
        self._out.write(member_header(PrefixFiles.member, 0))
        for block in blocks:
            self._out.write(block)
        size = self._out.size - begin - tar.BLOCK
        self._out.write(bytes(tar.padding(size)))
        self._out.patch(begin, member_header(PrefixFiles.member, size))

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest and the end, then the index.

        Raises:
            BundleError: there are more files than a reader takes.
        """
        data = manifest.to_json()
        if len(data) > LIMIT:
            raise BundleError(
                f"the environment has {len(manifest.files)} files: their list has {len(data)} bytes,"
                f" and at most {LIMIT} are read",
                hint="leave out data with --exclude PATTERN, and bring them with: clusterctl push SRC DEST",
            )
        offset = self.next_data
        self._member(MANIFEST, data)
        self._out.write(tar.END)
        self._out.patch(0, index_member(offset, len(data), hashlib.sha256(data).hexdigest(), self._split))

    def _member(self, name: str, data: bytes) -> None:
        self._out.write(member_header(name, len(data)))
        self._out.write(data)
        self._out.write(bytes(tar.padding(len(data))))


@contextmanager
def create(out: Path, *, split: int = 0) -> Iterator[Writer]:
    """Write a bundle that appears under its name only when it is whole; nothing stays behind otherwise.

    Args:
        out: the bundle.
        split: bytes of a slice; 0 for one file.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    with output.created(out, split=split) as files:
        yield Writer(files, split)
