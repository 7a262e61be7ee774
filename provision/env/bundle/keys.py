"""Keys of chunks: equal for two environments that were built at different times from the same packages.

A chunk's digest also depends on the mtimes of its files, which are new after a reinstall, and on the compressor. Its
key does not: it is the sha256 of one record for each member in the order of the stream. A record has four fields, each
followed by a NUL:

- the path;
- ``file``, ``link``, ``hard`` or ``dir``;
- the mode in octal;
- a file's sha256 in hexadecimal (see ``content_digest``), a link's target, nothing for a folder.

The key of a raw range is that of one record: path, ``raw``, mode, and ``OFFSET:SHA256`` with the sha256 of the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from provision.env.bundle.manifest import Entry

_NO_FLAGS = bytes(4)


def content_digest(path: str, data: bytes | memoryview) -> str:
    """The sha256 of a file for a key: that of a .pyc file does not depend on the mtime of its source.

    The header of a .pyc file (PEP 552) has four bytes of magic, four of flags, and with no flag set four of its
    source's mtime and four of its source's size.
    """
    if not has_source_time(path, data):
        return hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(bytes(data[:8]) + bytes(4))
    digest.update(memoryview(data)[12:])
    return digest.hexdigest()


def has_source_time(path: str, data: bytes | memoryview) -> bool:
    """Whether a file contains the mtime of its source."""
    return path.endswith(".pyc") and len(data) >= 16 and data[4:8] == _NO_FLAGS


def record(path: bytes, kind: str, mode: int, content: bytes) -> bytes:
    """The record of one member."""
    return b"%b\0%b\0%o\0%b\0" % (path, kind.encode(), mode, content)


def of_records(records: Iterable[bytes]) -> str:
    """The key of a chunk from the records of its members."""
    return hashlib.sha256(b"".join(records)).hexdigest()


def of_members(members: Iterable[tuple[Entry, str]]) -> str:
    """The key of a tar chunk from its members, in the order of the stream, and their ``content_digest``."""
    return of_records(
        record(os.fsencode(entry.path), entry.type, entry.mode, os.fsencode(entry.target or digest))
        for entry, digest in members
    )


def of_range(path: str, mode: int, offset: int, sha256: str) -> str:
    """The key of the range at ``offset`` of a large file with this sha256."""
    return of_records([record(os.fsencode(path), "raw", mode, f"{offset}:{sha256}".encode())])
