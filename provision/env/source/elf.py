"""Read ELF files: the platform, the newest glibc that a file needs, and its segments.

Source of the offsets: the System V ABI, chapter 4, and the Linux Standard Base, "Symbol Versioning".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from mmap import mmap

MAGIC = b"\x7fELF"

# e_machine -> conda's name of the platform
_PLATFORMS = {62: "linux-64", 183: "linux-aarch64", 21: "linux-ppc64le", 22: "linux-s390x"}

_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)(?:\.\d+)?\Z")
_LOAD = 1  # PT_LOAD
_DYNAMIC = 2  # PT_DYNAMIC
_STRTAB = 5  # DT_STRTAB
_RUN_PATHS = (15, 29)  # DT_RPATH, DT_RUNPATH
_VERNEED = 0x6FFFFFFE  # SHT_GNU_verneed
_MANY = 4096  # links of a chain; a longer one is a loop in a damaged file

Read = Callable[[int, int], bytes]
"""Bytes of a file: ``read(offset, size)``; fewer at its end."""


def platform(head: bytes) -> str | None:
    """Conda's name of the platform of an ELF file; None if it is unknown or the file is not ELF."""
    if head[:4] != MAGIC or len(head) < 20:
        return None
    order = "<" if head[5] == 1 else ">"
    return _PLATFORMS.get(struct.unpack_from(order + "H", head, 18)[0])


def glibc(read: Read) -> tuple[int, int] | None:
    """The newest ``GLIBC_x.y`` in the file's table of needed symbol versions.

    Returns:
        The version; None if the file needs none, is not ELF, or is damaged.
    """
    try:
        return max(_needed_versions(read), default=None)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None


def loaded_ranges(data: bytes | mmap) -> tuple[range, ...]:
    """The bytes of an ELF file that a process loads (PT_LOAD); the rest is for linkers and debuggers.

    Returns:
        Ranges of offsets; the whole file if its headers are damaged.
    """
    order = "<" if data[5:6] == b"\1" else ">"
    try:
        rows = segments(partial(_slice, data), order, wide=data[4:5] == b"\2")
    except (struct.error, OverflowError):
        rows = []
    found = tuple(range(offset, offset + length) for kind, offset, _, length in rows if kind == _LOAD)
    return found or (range(len(data)),)


def segments(read: Read, order: str, *, wide: bool) -> list[tuple[int, int, int, int]]:
    """Kind, offset, address and length in the file of every segment.

    Args:
        read: reads the file.
        order: its byte order, as in struct.
        wide: it is a 64-bit file.

    Raises:
        struct.error, OverflowError: it is damaged.
    """
    head = read(0, 64)
    table = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)[0]
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    segment = struct.Struct(order + ("I4xQQ8xQ" if wide else "III4xI"))
    rows = read(table, size * count)
    return [segment.unpack_from(rows, index * size) for index in range(count)]


def run_paths(data: bytes) -> tuple[range, ...]:
    """The strings that list folders for the loader to search (DT_RPATH, DT_RUNPATH).

    Returns:
        Ranges of offsets, in order; none if the file has none, is not ELF, or is damaged.
    """
    try:
        return tuple(sorted(_run_paths(data), key=lambda found: found.start))
    except (struct.error, IndexError, ValueError, OverflowError, StopIteration):
        return ()


def _run_paths(data: bytes) -> list[range]:
    if data[:4] != MAGIC:
        return []
    order = "<" if data[5] == 1 else ">"
    wide = data[4] == 2
    rows = segments(partial(_slice, data), order, wide=wide)
    dynamic = next((one for one in rows if one[0] == _DYNAMIC), None)
    if dynamic is None:
        return []
    item = struct.Struct(order + ("QQ" if wide else "II"))
    _, start, _, length = dynamic
    items = [item.unpack_from(data, start + at) for at in range(0, length - length % item.size, item.size)]
    table = next(value for tag, value in items if tag == _STRTAB)
    strings = next(
        table - address + offset
        for kind, offset, address, size in rows
        if kind == _LOAD and address <= table < address + size
    )
    begins = {strings + value for tag, value in items if tag in _RUN_PATHS}
    return [range(begin, data.index(b"\0", begin)) for begin in begins]


def _needed_versions(read: Read) -> Iterator[tuple[int, int]]:
    head = read(0, 64)
    if head[:4] != MAGIC:
        return
    order = "<" if head[5] == 1 else ">"
    wide = head[4] == 2
    table = struct.unpack_from(order + ("Q" if wide else "I"), head, 40 if wide else 32)[0]
    size, count = struct.unpack_from(order + "HH", head, 58 if wide else 46)
    section = struct.Struct(order + ("IIQQQQIIQQ" if wide else "10I"))
    rows = read(table, size * count)
    sections = [section.unpack_from(rows, index * size) for index in range(count)]
    for row in sections:
        if row[1] == _VERNEED:
            names = sections[row[6]]
            strings = read(names[4], names[5])
            yield from _versions(read(row[4], row[5]), strings, order)


def _versions(data: bytes, strings: bytes, order: str) -> Iterator[tuple[int, int]]:
    """Walk the chain of files (Verneed), and for each its chain of versions (Vernaux)."""
    at = 0
    for _ in range(_MANY):
        _version, _count, _file, aux, following = struct.unpack_from(order + "HHIII", data, at)
        here = at + aux
        for _ in range(_MANY):
            _hash, _flags, _other, name, step = struct.unpack_from(order + "IHHII", data, here)
            if match := _GLIBC.match(strings[name : strings.index(b"\0", name)]):
                yield int(match[1]), int(match[2])
            if not step:
                break
            here += step
        if not following:
            return
        at += following


def _slice(data: bytes | mmap, offset: int, size: int) -> bytes:
    return data[offset : offset + size]
