"""What a release keeps to check itself: lists that ``sha256sum -c`` reads, one for every chunk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

from provision.env.bundle.manifest import Entry


def lines(entries: Iterable[Entry]) -> bytes:
    """One line for every file among ``entries``, as ``sha256sum`` writes it."""
    return b"".join(_line(entry) for entry in entries if entry.type == "file")


def links(entries: Iterable[Entry]) -> bytes:
    """Two lines for every symlink: its path and its target, escaped like the names of ``lines``."""
    return b"".join(
        b"%b\n%b\n" % (escaped(entry.path), escaped(entry.target)) for entry in entries if entry.type == "link"
    )


def escaped(name: str) -> bytes:
    r"""A name on one line, for ``printf %b``: ``\\``, ``\n`` and ``\r`` for a backslash, newline, carriage return."""
    return os.fsencode(name).replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def contents_key(entries: Iterable[Entry], *more: str) -> str:
    """64 hex digits that name these files by path, mode and content, whatever their times."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(b"%o %b %b\0" % (entry.mode, entry.sha256.encode(), os.fsencode(entry.path)))
    for text in more:
        digest.update(text.encode())
    return digest.hexdigest()


def _line(entry: Entry) -> bytes:
    name = escaped(entry.path)
    # coreutils: a line begins with a backslash if its name is escaped.
    return b"%b%b  %b\n" % (b"\\" if b"\\" in name else b"", entry.sha256.encode(), name)
