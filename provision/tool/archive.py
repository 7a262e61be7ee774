"""The tool's archive: a tar of plain files, compressed with gzip, which most machines have.

Equal files give equal bytes: times, owners and modes are fixed. The compressed stream is a sequence of gzip members
(RFC 1952, 2.2), compressed on all processors; ``gzip -d`` and busybox join them. ``stripped`` removes symbols from ELF
files where there is no ``strip``.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import tarfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from provision.env.source import elf
from provision.model import Emit, Progress
from provision.tool.contents import COMPLETE, Item

STAGE = "tool"

_MTIME = 315532800  # 1980-01-01
_BLOCK = 4 << 20  # bytes that become one gzip member
_LEVEL = 6  # 9 takes three times as long, for one percent


class _Compressor(io.RawIOBase):
    """Receives a tar and writes gzip members in order; ``digest`` is the sha256 of the tar."""

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
        The sha256 of the tar and its size in bytes, which is the size of the unpacked tool.

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


_ALLOCATED = 2  # SHF_ALLOC: the process sees it
_NO_BITS = 8  # SHT_NOBITS: no bytes in the file
_WIDE = 2  # EI_CLASS of a 64-bit file


def stripped(data: bytes) -> bytes:
    """An ELF file up to the last byte that is loaded, with a table of the sections that are left.

    A file that is not 64-bit ELF, is damaged, or has an unusual layout is returned unchanged.
    """
    try:
        return _stripped(data)
    except (struct.error, IndexError, ValueError, OverflowError):
        return data


def _stripped(data: bytes) -> bytes:
    if data[:4] != elf.MAGIC or data[4] != _WIDE:
        return data
    order = "<" if data[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", data, 40)
    size, count, names = struct.unpack_from(order + "HHH", data, 58)
    section = struct.Struct(order + "IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry
    sections = [section.unpack_from(data, table + index * size) for index in range(count)]
    kept = 1 + max(index for index, each in enumerate(sections) if each[2] & _ALLOCATED)
    if not all(each[2] & _ALLOCATED for each in sections[1:kept]) or size != section.size:
        return data  # symbols refer to sections by number, which would change
    ends = [each[4] + each[5] for each in sections[1:kept] if each[1] != _NO_BITS]
    end = max(*ends, *(piece.stop for piece in elf.loaded(data)))
    _, _, _, _, offset, length, *_ = sections[names]
    text = data[offset : offset + length]
    place = -(-(end + length) // 8) * 8
    if place + (kept + 1) * size >= len(data):
        return data
    named = (*sections[names][:4], end, *sections[names][5:])
    rows = b"".join(section.pack(*each) for each in (*sections[:kept], named))
    head = bytearray(data[:end])
    struct.pack_into(order + "Q", head, 40, place)
    struct.pack_into(order + "HH", head, 60, kept + 1, kept)
    return bytes(head) + text.ljust(place - end, b"\0") + rows
