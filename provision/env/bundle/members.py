"""Read members of a bundle, block by block, and check them on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import IO, cast

import zstandard

from provision.env.bundle.manifest import Chunk, PrefixFiles
from provision.env.bundle.slices import BLOCK, Slices
from provision.errors import BundleError

WINDOW = (
    128 << 20
)  # bytes that a zstd frame may refer back to, and a reader holds in memory; `zstd --long=27` has as many


def compressed(slices: Slices, member: Chunk | PrefixFiles) -> Iterator[bytes]:
    """A member as it lies in the bundle; its digest is checked at the end.

    Raises:
        BundleError: it is damaged.
    """
    digest = hashlib.sha256()
    for block in slices.read(member.offset, member.compressed):
        digest.update(block)
        yield block
    if digest.hexdigest() != member.digest:
        raise damaged(slices, member)


def decompressed(slices: Slices, member: Chunk | PrefixFiles) -> Iterator[bytes]:
    """A member's own bytes; what they were made of is checked at the end, and no more come than the manifest says.

    Raises:
        BundleError: it is damaged.
    """
    left = member.size
    source = _Source(compressed(slices, member))
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        cast("IO[bytes]", source)
    )  # it calls nothing but read
    try:
        while block := reader.read(BLOCK):
            left -= len(block)
            if left < 0:
                raise damaged(slices, member)
            yield block
    except zstandard.ZstdError as error:
        source.drain()  # where damage on the disk is noticed first
        raise damaged(slices, member) from error
    source.drain()
    if left:
        raise damaged(slices, member)


def damaged(slices: Slices, member: Chunk | PrefixFiles) -> BundleError:
    """The error for a member whose bytes are not the manifest's."""
    return slices.damaged(member.member, member.offset, member.compressed)


class Stream:
    """Blocks, taken apart into pieces of given lengths."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = memoryview(b"")

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes as they come, fewer at the end; take them all before asking for more."""
        while size:
            if not self._block:
                self._block = memoryview(next(self._blocks, b""))
                if not self._block:
                    return
            piece = self._block[:size]
            self._block = self._block[size:]
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        return b"".join(self.pieces(size))

    def drain(self) -> None:
        """Read to the end, where blocks are checked."""
        for _ in self._blocks:
            pass


class _Source:
    """Blocks as the file that zstandard reads from."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks

    def read(self, _size: int = -1) -> bytes:
        return next(self._blocks, b"")

    def drain(self) -> None:
        for _ in self._blocks:
            pass
