"""Tar members in the GNU format, to the byte: what GNU tar, busybox and bsdtar all read.

The bytes of a member are a pure function of its entry. A reader therefore needs no parser: it builds the header that
must be there and compares. Long names and link targets have a ``././@LongLink`` member before their own, sizes from
8 GiB on are in base 256. Owner and group are 0 and have no names.
"""

from __future__ import annotations

import os

from provision.env.bundle.manifest import Entry

BLOCK = 512
END = bytes(2 * BLOCK)  # closes a stream

_NAME = 100  # bytes of the header's name and link fields
_OCTAL = 8**11  # numbers from here on need more than the eleven digits that there are
_OWNER = b"0000000\0" * 2
_MAGIC = b"ustar  \0"
_REST = _MAGIC.ljust(BLOCK - 257, b"\0")
_CONSTANT = sum(_MAGIC) + sum(b" " * 8)  # in every check sum, which counts its own place as spaces

TYPES = {"file": b"0", "hard": b"1", "link": b"2", "dir": b"5"}


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
        kind=TYPES[entry.type],
        target=os.fsencode(entry.target),
    )


def header_size(entry: Entry) -> int:
    """The length of ``entry_header(entry)``."""
    return link_span(entry.path + ("/" if entry.type == "dir" else ""), entry.target)


def span(entry: Entry) -> int:
    """The bytes that an entry takes in a stream: header, data and padding."""
    if entry.type == "file":
        return file_span(entry.path, entry.size)
    return header_size(entry) + entry.size + padding(entry.size)


def file_span(path: str, size: int) -> int:
    """The ``span`` of a file."""
    return BLOCK + _long_size(path) + size + -size % BLOCK


def link_span(name: str, target: str) -> int:
    """The ``span`` of a link of either kind, or of a folder, whose ``name`` then ends in a slash."""
    return BLOCK + _long_size(name) + (_long_size(target) if target else 0)


def _name(entry: Entry) -> bytes:
    return os.fsencode(entry.path) + (b"/" if entry.type == "dir" else b"")


def _long_size(name: str) -> int:
    """The bytes of the long-name member that a name or target needs."""
    length = len(name) if name.isascii() else len(os.fsencode(name))
    if length <= _NAME:
        return 0
    return BLOCK + length + 1 + padding(length + 1)


def _long(kind: bytes, value: bytes) -> bytes:
    data = value + b"\0"
    block = _block(b"././@LongLink", size=len(data), mode=0o644, mtime=0, kind=kind, target=b"")
    return block + data + bytes(padding(len(data)))


def _number(value: int) -> bytes:
    return b"%011o\0" % value if value < _OCTAL else b"\x80" + value.to_bytes(11, "big")


def _block(name: bytes, *, size: int, mode: int, mtime: int, kind: bytes, target: bytes) -> bytes:
    name, target = name[:_NAME], target[:_NAME]
    if size < _OCTAL and mtime < _OCTAL:
        numbers = b"%07o\0%b%011o\0%011o\0" % (mode, _OWNER, size, mtime)
    else:
        numbers = b"%07o\0%b%b%b" % (mode, _OWNER, _number(size), _number(mtime))
    total = sum(name) + sum(numbers) + sum(kind) + sum(target) + _CONSTANT
    return b"%b%b%06o\0 %b%b%b" % (name.ljust(_NAME, b"\0"), numbers, total, kind, target.ljust(_NAME, b"\0"), _REST)
