"""Rewrite paths inside binaries without moving anything else."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from mmap import mmap

from provision.env.relocation.prefixes import Search
from provision.env.source import elf

# Archives contain checksums of their parts: zip (also .pt and .npz), gzip, zstd, xz, bzip2.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")

# The rest of a path that compilers put into messages (__FILE__).
_SOURCE_FILE = re.compile(rb"/[^\0\n:]*\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|hxx|inl|ipp|rs|py|pyx|f90)(?=[\0\n: ])")


class CannotRewrite(ValueError):  # noqa: N818 - the message becomes a reason, not an error
    """A binary that cannot be changed; the message says why."""


def rewrite(data: bytes, search: Search, new: Mapping[str, str], *, room: int = 0, path: str = "") -> tuple[bytes, str]:
    """Replace source paths in a binary without changing its size.

    In a file from conda (``room``), strings are NUL-padded to their length with conda's placeholder, and can become
    shorter or longer within that. In other files a shorter path is padded with slashes, so that the rest of its string
    does not move: linkers let strings share their ends.

    A longer path cannot be written. A path that the loader searches for libraries is replaced by a path from
    ``$ORIGIN`` (the file's folder) if that fits. Remaining old paths are an error in binaries that conda declares and
    in bytes that a program loads, unless they name a source file for messages. Elsewhere (debug information, caches,
    archives) they give a warning.

    Args:
        data: the file.
        search: the sources.
        new: the new path of each relocation's target.
        room: the length of conda's placeholder; 0 without one.
        path: the file's path, relative to the prefix; empty to write no ``$ORIGIN`` paths.

    Returns:
        The new content, and why old paths remain in it; empty if none do.

    Raises:
        CannotRewrite: an old path would remain that a program may use.
    """
    if room and (padded := _padded(data, search, new, room)) is not None:
        return padded, ""
    if data.startswith(_ARCHIVES):
        return data, "it keeps the old path, since it is an archive with checksums"
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
        return search.replace(data, new, keep_length=True), f"it keeps the old path in unused places: {reason}"
    return search.replace(data, new, keep_length=True), ""


def matters(data: bytes | mmap, found: list[re.Match[bytes]]) -> bool:
    """Whether a running program may use one of the matched paths."""
    if data[:4] != elf.MAGIC:
        return False
    loaded = elf.loaded(data)
    return any(any(match.start() in part for part in loaded) and not names_source(data, match.end()) for match in found)


def names_source(data: bytes | mmap, end: int) -> bool:
    """Whether a path that ends at ``end`` continues with the name of a source file, as in compilers' messages."""
    return _SOURCE_FILE.match(data, end) is not None


def _from_origin(data: bytes, search: Search, new: Mapping[str, str], path: str) -> bytes:
    """Replace paths that the loader searches by paths from the file's folder if the new path is too long."""
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
    """Rewrite C strings within the room of conda's placeholder; None if they lack that room."""
    pieces = []
    done = 0
    for match, _ in search.occurrences(data):
        start = match.start()
        if start < done:
            continue  # in the string that was just rewritten
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
