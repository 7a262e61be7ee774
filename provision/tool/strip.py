"""ELF files without what only linkers and debuggers read: what ``strip`` removes, where there is no ``strip``.

A third of a tool with a Python built by pyenv, and of many wheels. Nothing that a process sees moves or changes. Source
of the offsets: the System V ABI, chapter 4.
"""

from __future__ import annotations

import struct

from provision.env.source import elf

_ALLOCATED = 2  # SHF_ALLOC: the process sees it
_NO_BITS = 8  # SHT_NOBITS: no bytes in the file
_WIDE = 2  # EI_CLASS of a 64-bit file


def stripped(data: bytes) -> bytes:
    """An ELF file up to the last byte that is loaded, with a table of the sections that are left.

    What is no 64-bit ELF file, a damaged one, or laid out in another way than linkers do comes back as it is.
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
        return data  # a section would get another number, and symbols name them by number
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
