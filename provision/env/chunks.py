"""Plan the chunks: which files are packed together, before any is read."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from provision.env.scan import Found

LIMIT = 64 << 20  # bytes of files in a tar chunk, and of a range of a large file

FOLDERS = "./"  # the "package" of the chunk that holds every folder


@dataclass(frozen=True)
class Part:
    """Files that become one tar chunk, or one large file that becomes several raw ones (``raw``)."""

    package: str
    found: tuple[Found, ...]
    raw: bool = False

    @cached_property
    def size(self) -> int:
        """Bytes of files."""
        return sum(one.size for one in self.found)


def plan(found: Iterable[Found], owner: Callable[[str], str], *, limit: int = LIMIT) -> tuple[Part, ...]:
    """Divide what was found into parts: large files first, then packages by path, last the folders, deepest first.

    Where a package is cut depends on nothing but that package, so that a change to one leaves every other's chunks as
    they were.
    """
    large: list[Part] = []
    packages: defaultdict[str, list[Found]] = defaultdict(list)
    folders: list[Found] = []
    for one in sorted(found, key=lambda one: one.path):
        if one.type == "dir":
            folders.append(one)
        elif one.size > limit:
            large.append(Part(owner(one.path), (one,), raw=True))
        else:
            packages[owner(one.path)].append(one)
    parts = [part for package in sorted(packages) for part in _cut(package, packages[package], limit)]
    last = [Part(FOLDERS, tuple(reversed(folders)))] if folders else []
    return (*large, *parts, *last)


def _cut(package: str, found: list[Found], limit: int) -> Iterable[Part]:
    part: list[Found] = []
    size = 0
    for one in found:
        if part and size + one.size > limit:
            yield Part(package, tuple(part))
            part, size = [], 0
        part.append(one)
        size += one.size
    if part:
        yield Part(package, tuple(part))


def is_record(path: str) -> bool:
    """Whether a file lists hashes of others: a RECORD, or a package's file in ``conda-meta``."""
    folder, name = posixpath.split(path)
    return (name == "RECORD" and folder.endswith(".dist-info")) or (folder == "conda-meta" and name.endswith(".json"))
