"""Rewrite paths inside binaries without moving anything else."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from mmap import mmap

from provision.env.relocation.prefixes import Search
from provision.env.source import elf

# Archives carry check sums of their parts: zip (also .pt and .npz), gzip, zstd, xz, bzip2.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")

# The rest of a path that compilers put into messages (__FILE__).
_SOURCE_FILE = re.compile(rb"/[^\0\n:]*\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|hxx|inl|ipp|rs|py|pyx|f90)(?=[\0\n: ])")


class CannotRewrite(ValueError):  # noqa: N818 - the message becomes a reason, not an error
    """A binary that has to stay as it is; the message says why."""


def rewrite(data: bytes, search: Search, new: Mapping[str, str], *, room: int = 0, path: str = "") -> tuple[bytes, str]:
    """Replace source paths in a binary; its length stays.

    Where conda installed the file (``room``), the strings are NUL-padded to the length that they had with conda's
    placeholder, and are shortened or lengthened within that. Elsewhere a shorter path is filled up with slashes, so
    that not even the rest of its string moves: linkers let strings share their ends.

    A longer path cannot be written. Where the loader searches it for libraries, one from ``$ORIGIN`` (the file's own
    folder) stands for it if it fits. What is left matters in what conda declared, and in what a program loads, unless
    it is only the name of a source file for messages; elsewhere (debug information, caches, archives) it is worth a
    warning.

    Args:
        data: the file.
        search: the sources.
        new: the new path of each relocation's target.
        room: the length of conda's placeholder; 0 without one.
        path: where the file lies, relative to the prefix; empty if paths from ``$ORIGIN`` are not wanted.

    Returns:
        The new content, and why old paths were left in it; empty if none were.

    Raises:
        CannotRewrite: an old path would be left that matters.
    """
    if room and (padded := _padded(data, search, new, room)) is not None:
        return padded, ""
    if data.startswith(_ARCHIVES):
        return data, "it keeps the old path, since it is an archive with check sums inside"
    if path:
        data = _from_origin(data, search, new, path)
    too_long = [
        match
        for match, spelling in search.occurrences(data)
        if len(match[0]) < len(spelling.encode(new[spelling.target]))
    ]
    if too_long:
        reason = f"it is a binary with room for a path of {min(len(match[0]) for match in too_long)} bytes"
        if room or matters(data, too_long):
            raise CannotRewrite(reason)
        return search.replace(data, new, keep_length=True), f"it keeps the old path where nothing uses it: {reason}"
    return search.replace(data, new, keep_length=True), ""


def matters(data: bytes | mmap, found: list[re.Match[bytes]]) -> bool:
    """Whether a running program may use one of the paths that were found."""
    if data[:4] != elf.MAGIC:
        return False
    loaded = elf.loaded(data)
    return any(any(match.start() in part for part in loaded) and not names_source(data, match.end()) for match in found)


def names_source(data: bytes | mmap, end: int) -> bool:
    """Whether a path that ends at ``end`` goes on to the name of a source file, as compilers write it for messages."""
    return _SOURCE_FILE.match(data, end) is not None


def _from_origin(data: bytes, search: Search, new: Mapping[str, str], path: str) -> bytes:
    """Paths that the loader searches, from the file's own folder wherever the new path is too long for its place."""
    pieces = []
    done = 0
    for part in elf.run_paths(data):
        for match, spelling in search.occurrences(data):
            fits = len(spelling.encode(new[spelling.target])) <= len(match[0])
            if fits or match.start() not in part or match.start() < done:
                continue
            relative = posixpath.relpath(spelling.target or ".", posixpath.dirname(path) or ".")
            origin = os.fsencode(f"$ORIGIN/{relative}")
            if len(origin) <= len(match[0]):
                pieces += [data[done : match.start()], origin.ljust(len(match[0]), b"/")]
                done = match.end()
    return b"".join([*pieces, data[done:]])


def _padded(data: bytes, search: Search, new: Mapping[str, str], room: int) -> bytes | None:
    """Rewrite C strings within the room of conda's placeholder; None if they do not have that room."""
    pieces = []
    done = 0
    for match, _ in search.occurrences(data):
        start = match.start()
        if start < done:
            continue  # in the string that was rewritten last
        end = data.find(b"\0", start)
        string = data[start:end]
        spare = sum(room - len(found.group()) for found, _ in search.occurrences(string))
        rewritten = search.replace(string, new)
        capacity = len(string) + spare
        if end < 0 or spare < 0 or len(rewritten) > capacity or data[end : end + spare + 1].strip(b"\0"):
            return None
        pieces += [data[done:start], rewritten.ljust(capacity, b"\0")]
        done = start + capacity
    return b"".join([*pieces, data[done:]])
