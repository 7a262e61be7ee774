"""Compress the bytes of one member of a bundle, and hash what comes out.

zstd's own check sums are left out: sha256 covers every compressed byte, and every file that is in them.
"""

from __future__ import annotations

import hashlib

import zstandard

# Level 2 with tables that suit chunks of up to 16 MiB. The small files of an environment of 2.2 GB, with torch for the
# CPU, become 2.5 % longer than by level 3, zstd's default, with such tables, and 15 % quicker. Beyond it, packing takes
# longer than most networks save.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(2, window_log=22, hash_log=17, min_match=6)

_BLOCK = 1 << 20  # bytes handed to the hash and the compressor at once


def compress(data: bytes | memoryview) -> bytes:
    """A whole frame in one go: quicker, and shorter, than block by block."""
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)


class FrameMaker:
    """Takes the bytes of one member as they come, and gives compressed ones back.

    Attributes:
        size: bytes that were added.
        compressed: bytes that were given back.
    """

    def __init__(self) -> None:
        self.size = 0
        self.compressed = 0
        self._hash = hashlib.sha256()
        self._compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()
        self._pieces: list[bytes] = []
        self._waiting = 0

    @property
    def digest(self) -> str:
        """The sha256 of what was given back, when all was."""
        return self._hash.hexdigest()

    def add(self, *pieces: bytes) -> bytes:
        """Add bytes; small ones are gathered first."""
        self._pieces += pieces
        self._waiting += sum(map(len, pieces))
        return self._drain() if self._waiting >= _BLOCK else b""

    def finish(self) -> bytes:
        """The end of the frame."""
        return self._drain() + self._out(self._compressor.flush())

    def _drain(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces, self._waiting = [], 0
        self.size += len(data)
        return self._out(self._compressor.compress(data))

    def _out(self, block: bytes) -> bytes:
        self.compressed += len(block)
        self._hash.update(block)
        return block
