"""Rewrite paths inside binaries without moving anything else."""

from __future__ import annotations

from collections.abc import Mapping

from provision.env.prefixes import Search

# Archives carry check sums of their parts: zip (also .pt and .npz), gzip, zstd, xz, bzip2.
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh")


class CannotRewrite(ValueError):  # noqa: N818 - the message becomes a reason, not an error
    """A binary that has to stay as it is; the message says why."""


def rewrite(data: bytes, search: Search, new: Mapping[str, str], *, room: int = 0) -> bytes:
    """Replace source paths in a binary; its length stays.

    Where conda installed the file (``room``), the strings are NUL-padded to the length that they had with conda's
    placeholder, and are shortened or lengthened within that. Elsewhere a shorter path is filled up with slashes, so
    that not even the rest of its string moves: linkers let strings share their ends.

    Args:
        data: the file.
        search: the sources.
        new: the new path of each relocation's target.
        room: the length of conda's placeholder; 0 without one.

    Raises:
        CannotRewrite: the new path is too long, or the file is an archive.
    """
    if data.startswith(_ARCHIVES):
        raise CannotRewrite("it is an archive with check sums inside")
    if room and (padded := _padded(data, search, new, room)) is not None:
        return padded
    for match, spelling in search.occurrences(data):
        text = spelling.encode(new[spelling.target])
        if len(text) > len(match.group()):
            lengths = f"{len(match.group())} bytes; {new[spelling.target]} has {len(text)}"
            raise CannotRewrite(f"it is a binary with room for a path of {lengths}")
    return search.replace(data, new, keep_length=True)


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
