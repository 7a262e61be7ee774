"""What an ELF file tells the dynamic loader: the libraries it needs, and where to look for them.

Source of the offsets: the System V ABI, chapters 4 and 5. Only 64-bit files are read, which are all that a platform of
``provision.env.source.elf`` runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import takewhile

from provision.env.source import elf
from provision.env.source.elf import Read

_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3  # p_type
_NULL, _NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH = 0, 1, 5, 10, 15, 29  # d_tag
_WIDE = 2  # EI_CLASS of a 64-bit file


@dataclass(frozen=True)
class Dynamic:
    """The folders are as written in the file; ``$ORIGIN`` is not filled in."""

    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    loader: str = ""  # of a program: what the kernel starts it with


def dynamic(read: Read) -> Dynamic | None:
    """What a file tells the loader; None if it is no 64-bit ELF file, or a damaged one."""
    try:
        return _dynamic(read)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None


def _dynamic(read: Read) -> Dynamic | None:
    head = read(0, 64)
    if head[:4] != elf.MAGIC or head[4] != _WIDE:
        return None
    order = "<" if head[5] == 1 else ">"
    segments = elf.segments(read, order, wide=True)
    loader = "".join(_text(read(at, length), 0) for kind, at, _, length in segments if kind == _INTERPRETER)
    table = b"".join(read(at, length // 16 * 16) for kind, at, _, length in segments if kind == _DYNAMIC)
    entries = list(takewhile(lambda entry: entry[0] != _NULL, struct.iter_unpack(order + "QQ", table)))
    values = dict(entries)
    if _STRINGS not in values:
        return Dynamic(loader=loader)
    address = values[_STRINGS]  # as the process sees it
    (place,) = [at + address - start for kind, at, start, length in segments if _covers(kind, start, length, address)]
    strings = read(place, values[_STRINGS_SIZE])

    def texts(wanted: int) -> list[str]:
        return [_text(strings, value) for tag, value in entries if tag == wanted]

    def folders(wanted: int) -> tuple[str, ...]:
        return tuple(folder for text in texts(wanted) for folder in text.split(":") if folder)

    return Dynamic(tuple(texts(_NEEDED)), folders(_RPATH), folders(_RUNPATH), loader)


def _covers(kind: int, start: int, length: int, address: int) -> bool:
    return kind == _LOAD and start <= address < start + length


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="surrogateescape")
