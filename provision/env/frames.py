"""Hash and compress the bytes of one chunk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import zstandard

LEVEL = 3  # zstd's own default: beyond it, packing takes longer than most networks save

_BLOCK = 1 << 20  # bytes handed to the hash and the compressor at once


@dataclass(frozen=True)
class Frame:
    """A compressed chunk that has no place in a bundle yet; fields as in ``manifest.Chunk``."""

    kind: Literal["tar", "raw"]
    digest: str
    size: int
    sha256: str
    blocks: tuple[bytes, ...]

    @property
    def compressed(self) -> int:
        """Bytes compressed."""
        return sum(map(len, self.blocks))


class FrameMaker:
    """Takes the bytes of one chunk as they come; only compressed ones stay in memory.

    Args:
        kind: what the chunk will be.
        threads: zstd's own threads; 0 compresses in the caller's.
    """

    def __init__(self, kind: Literal["tar", "raw"], *, threads: int = 0) -> None:
        self._kind: Literal["tar", "raw"] = kind
        self._hash = hashlib.sha256()
        self._compressed_hash = hashlib.sha256()
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, threads=threads).compressobj()
        self._blocks: list[bytes] = []
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._size = 0

    def add(self, *pieces: bytes) -> None:
        """Add bytes; small ones are gathered first."""
        self._pieces += pieces
        self._waiting += sum(map(len, pieces))
        if self._waiting >= _BLOCK:
            self._drain()

    def finish(self) -> Frame:
        """The frame of everything that was added."""
        self._drain()
        self._keep(self._compressor.flush())
        sha256 = self._compressed_hash.hexdigest()
        return Frame(self._kind, self._hash.hexdigest(), self._size, sha256, tuple(self._blocks))

    def _drain(self) -> None:
        data = b"".join(self._pieces)
        self._pieces, self._waiting = [], 0
        self._size += len(data)
        self._hash.update(data)
        self._keep(self._compressor.compress(data))

    def _keep(self, block: bytes) -> None:
        if block:
            self._compressed_hash.update(block)
            self._blocks.append(block)
