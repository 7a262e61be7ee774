"""Keys of chunks: what is the same in two environments that were built at different times from the same packages.

A chunk's digest covers the times of its files, and those of a reinstalled package are new; it also depends on who
compressed them. Its key is the sha256 of one record for each member in the order of the stream, each of four fields
with a NUL after each:

- its path;
- ``file``, ``link``, ``hard`` or ``dir``;
- its mode in octal;
- a file's sha256 in hexadecimal (see ``content``), a link's target, nothing for a folder.

The key of a raw range is that of one record: path, ``raw``, mode, and ``OFFSET:SHA256`` with the sha256 of the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from provision.env.bundle.manifest import Entry

_NO_FLAGS = bytes(4)


def content(path: str, data: bytes | memoryview) -> str:
    """What a file's content counts in a key: its sha256, of a .pyc file without the time of its source.

    The header of a .pyc file (PEP 552) has four bytes of magic, four of flags, and with no flag set four of its
    source's mtime and four of its source's size.
    """
    if not is_timed(path, data):
        return hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(bytes(data[:8]) + bytes(4))
    digest.update(memoryview(data)[12:])
    return digest.hexdigest()


def is_timed(path: str, data: bytes | memoryview) -> bool:
    """Whether a file holds its source's time."""
    return path.endswith(".pyc") and len(data) >= 16 and data[4:8] == _NO_FLAGS


def record(path: bytes, kind: str, mode: int, told: bytes) -> bytes:
    """The record of one member."""
    return b"%b\0%b\0%o\0%b\0" % (path, kind.encode(), mode, told)


def of_records(records: Iterable[bytes]) -> str:
    """The key of a chunk from the records of its members."""
    return hashlib.sha256(b"".join(records)).hexdigest()


def of_members(members: Iterable[tuple[Entry, str]]) -> str:
    """The key of a tar chunk, from its members in the order of the stream with what ``content`` says of files."""
    return of_records(
        record(os.fsencode(entry.path), entry.type, entry.mode, os.fsencode(entry.target or told))
        for entry, told in members
    )


def of_range(path: str, mode: int, offset: int, sha256: str) -> str:
    """The key of the range that begins at ``offset`` of a large file that has this sha256."""
    return of_records([record(os.fsencode(path), "raw", mode, f"{offset}:{sha256}".encode())])
