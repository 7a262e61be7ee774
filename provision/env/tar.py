"""Tar members in the GNU format, to the byte: what GNU tar, busybox and bsdtar all read.

The bytes of a member are a pure function of its entry. A reader therefore needs no parser: it builds the header that
must be there and compares. Long names and link targets have a ``././@LongLink`` member before their own, sizes from
8 GiB on are in base 256. Owner and group are 0 and have no names.
"""

from __future__ import annotations

import os

from provision.env.manifest import Entry

BLOCK = 512
END = bytes(2 * BLOCK)  # closes a stream

_NAME = 100  # bytes of the header's name and link fields
_TYPES = {"file": b"0", "link": b"2", "dir": b"5"}


def padding(size: int) -> int:
    """Zero bytes after ``size`` bytes of data."""
    return -size % BLOCK


def header(
    name: bytes, *, size: int = 0, mode: int = 0o644, mtime: int = 0, kind: bytes = b"0", target: bytes = b""
) -> bytes:
    """The header of one member, with the long-name members that it needs."""
    long_target = _long(b"K", target) if len(target) > _NAME else b""
    long_name = _long(b"L", name) if len(name) > _NAME else b""
    return long_target + long_name + _block(name, size=size, mode=mode, mtime=mtime, kind=kind, target=target)


def entry_header(entry: Entry) -> bytes:
    """The header of an entry."""
    return header(
        _name(entry),
        size=entry.size,
        mode=entry.mode,
        mtime=entry.mtime,
        kind=_TYPES[entry.type],
        target=os.fsencode(entry.target),
    )


def header_size(entry: Entry) -> int:
    """The length of ``entry_header(entry)``."""
    return BLOCK + _long_size(len(_name(entry))) + _long_size(len(os.fsencode(entry.target)))


def span(entry: Entry) -> int:
    """The bytes that an entry takes in a stream: header, data and padding."""
    return header_size(entry) + entry.size + padding(entry.size)


def _name(entry: Entry) -> bytes:
    return os.fsencode(entry.path) + (b"/" if entry.type == "dir" else b"")


def _long_size(length: int) -> int:
    return BLOCK + length + 1 + padding(length + 1) if length > _NAME else 0


def _long(kind: bytes, value: bytes) -> bytes:
    data = value + b"\0"
    block = _block(b"././@LongLink", size=len(data), mode=0o644, mtime=0, kind=kind, target=b"")
    return block + data + bytes(padding(len(data)))


def _number(value: int, digits: int) -> bytes:
    if value < 8**digits:
        return b"%0*o\0" % (digits, value)
    return b"\x80" + value.to_bytes(digits, "big")


def _block(name: bytes, *, size: int, mode: int, mtime: int, kind: bytes, target: bytes) -> bytes:
    block = b"".join(
        (
            name[:_NAME].ljust(_NAME, b"\0"),
            _number(mode, 7),
            b"0000000\x000000000\x00",
            _number(size, 11),
            _number(mtime, 11),
            b"        ",
            kind,
            target[:_NAME].ljust(_NAME, b"\0"),
            b"ustar  \0",
        )
    )
    return b"%b%06o\0 %b" % (block[:148], sum(block), block[156:].ljust(BLOCK - 156, b"\0"))
