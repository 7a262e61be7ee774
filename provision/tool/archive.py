"""The tool's archive: a tar of plain files, compressed with gzip, which is wherever tar is.

Equal files give equal bytes: times, owners and modes are fixed. The compressed stream is a sequence of gzip members
(RFC 1952, 2.2), made on all processors; ``gzip -d`` and busybox join them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from provision.model import Emit, Progress
from provision.tool.contents import COMPLETE, Item
from provision.tool.strip import stripped

STAGE = "tool"

_MTIME = 315532800  # 1980-01-01
_BLOCK = 4 << 20  # bytes that become one gzip member
_LEVEL = 6  # 9 takes three times as long, for one percent


class _Compressor(io.RawIOBase):
    """Takes a tar and writes gzip members, in their order; ``digest`` is the sha256 of the tar."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor, ahead: int) -> None:
        self._file = file
        self._pool = pool
        self._ahead = ahead
        self._block = bytearray()
        self._waiting: deque[Future[bytes]] = deque()
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override] # what tarfile hands over
        self._hash.update(data)
        self.size += len(data)
        self._block += data
        while len(self._block) >= _BLOCK:
            self._submit(bytes(self._block[:_BLOCK]))
            del self._block[:_BLOCK]
        return len(data)

    def finish(self) -> None:
        self._submit(bytes(self._block))
        while self._waiting:
            self._file.write(self._waiting.popleft().result())

    def _submit(self, block: bytes) -> None:
        while len(self._waiting) >= self._ahead:
            self._file.write(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(gzip.compress, block, _LEVEL, mtime=0))


def write(items: Mapping[str, Item], file: BinaryIO, emit: Emit) -> tuple[str, int]:
    """Write the archive.

    Returns:
        The sha256 of the tar, and its size in bytes: what the tool takes once it is unpacked.

    Raises:
        UsageError: a file cannot be read.
        OSError: the archive cannot be written.
    """
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        out = _Compressor(file, pool, 2 * threads)
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for number, (info, data) in enumerate(_members(items)):
                tar.addfile(info, io.BytesIO(data))
                if number % 64 == 0:
                    emit(Progress(STAGE, number, len(items)))
        out.finish()
    return out.digest, out.size


def _members(items: Mapping[str, Item]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name, item in items.items():
        data = stripped(item.read())
        yield _info(name, len(data), executable=item.executable), data
    yield _info(COMPLETE, 0), b""


def _info(name: str, size: int, *, executable: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o755 if executable else 0o644, _MTIME
    return info
