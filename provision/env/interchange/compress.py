"""Compress a stream on all processors, into what every gzip and zstd opens.

gzip: one member made of pieces that are compressed side by side, as pigz does; each knows the end of the one before it
(RFC 1951, 1952). zstd: frames one after the other, which ``zstd -d`` reads as one stream.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import zstandard

GZIP_LEVEL = 4  # conda-pack's own default
ZSTD_LEVEL = 3

_PIECE = 1 << 20  # bytes that one thread compresses at once
_WINDOW = 32 << 10  # how far back deflate looks
_HEADER = b"\x1f\x8b\x08\x00\0\0\0\0\x00\x03"  # deflate, no name, no time, Unix


def gzipped(blocks: Iterable[bytes], *, threads: int) -> Iterator[bytes]:
    """A gzip file of the blocks."""
    checksum, size = 0, 0
    window = b""

    def jobs() -> Iterator[Callable[[], bytes]]:
        nonlocal checksum, size, window
        for piece in in_pieces(blocks, _PIECE):
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
            yield _Deflate(piece, window)
            window = piece[-_WINDOW:]

    yield _HEADER
    yield from _side_by_side(jobs(), threads)
    yield zlib.compressobj(wbits=-zlib.MAX_WBITS).flush()
    yield struct.pack("<II", checksum, size & 0xFFFFFFFF)


def framed(blocks: Iterable[bytes], *, threads: int) -> Iterator[bytes]:
    """A zstd frame of the blocks; nothing if there are none."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, threads=threads).compressobj()
    empty = True
    for block in blocks:
        empty = False
        if data := compressor.compress(block):
            yield data
    if not empty:
        yield compressor.flush()


def in_pieces(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of ``size`` bytes; the last one may be shorter."""
    held: list[bytes] = []
    length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        if length < size:
            continue
        whole = b"".join(held)
        cut = length - length % size
        yield from (whole[start : start + size] for start in range(0, cut, size))
        held, length = [whole[cut:]], length - cut
    if length:
        yield b"".join(held)


class _Deflate:
    """Compress one piece, which ends at a byte boundary so that the next one can follow."""

    def __init__(self, piece: bytes, window: bytes) -> None:
        self._piece, self._window = piece, window

    def __call__(self) -> bytes:
        options = (GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY)
        compressor = zlib.compressobj(*options, self._window) if self._window else zlib.compressobj(*options)
        return compressor.compress(self._piece) + compressor.flush(zlib.Z_SYNC_FLUSH)


def _side_by_side(jobs: Iterator[Callable[[], bytes]], threads: int) -> Iterator[bytes]:
    """The results in their order, with only so many jobs under way that memory stays small."""
    waiting: deque[Future[bytes]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
