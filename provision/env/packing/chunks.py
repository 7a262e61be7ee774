"""Plan the chunks: which files are packed together, before any is read."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS
from provision.env.source.scan import Found

LIMIT = 16 << 20  # bytes of a tar chunk, and of a range of a large file: what a worker holds in memory


@dataclass(frozen=True)
class Part:
    """Files that become one tar chunk.

    Attributes:
        package: what the chunk belongs to.
        found: its members, in the order of the stream.
        span: bytes of the stream, if nothing is taken out of it.
        verbatim: it is data, and not searched for the prefix.
    """

    package: str
    found: tuple[Found, ...]
    span: int
    verbatim: bool = False

    @property
    def size(self) -> int:
        """Bytes of files."""
        return sum(one.size for one in self.found)


@dataclass(frozen=True)
class Large:
    """A file that becomes several raw chunks."""

    package: str
    found: Found
    verbatim: bool = False


@dataclass(frozen=True)
class Plan:
    """What is packed first, the largest first; then the parts, also the largest first; last hard links and folders."""

    large: tuple[Large, ...]
    parts: tuple[Part, ...]


def plan(
    found: Iterable[Found], owner: Callable[[str], str], *, limit: int = LIMIT, verbatim: Collection[str] = ()
) -> Plan:
    """Divide what was found.

    Where a package is cut depends on nothing but that package, so that a change to one leaves every other's chunks as
    they were. The large come before the small so that all processors are busy to the end.

    Args:
        found: everything that is packed.
        owner: the package of a path.
        limit: bytes of a chunk.
        verbatim: packages that are data.
    """
    large: list[Found] = []
    packages: defaultdict[str, list[tuple[Found, int]]] = defaultdict(list)
    hard: list[Found] = []
    folders: list[Found] = []
    for one in sorted(found):
        if one.type == "dir":
            folders.append(one)
        elif one.type == "hard":
            hard.append(one)
        elif (span := _span(one)) > limit and one.type == "file":
            large.append(one)
        else:
            packages[owner(one.path)].append((one, span))
    parts = [
        Part(package, found, span, package in verbatim)
        for package in packages
        for found, span in _cut(packages[package], limit)
    ]
    last = (*hard, *reversed(folders))
    return Plan(
        tuple(Large(owner(one.path), one, owner(one.path) in verbatim) for one in largest_first(large)),
        (
            *sorted(parts, key=lambda part: (-part.span, part.found[0].path)),
            *([Part(FOLDERS, last, sum(map(_span, last)))] if last else []),
        ),
    )


def largest_first(files: Iterable[Found]) -> list[Found]:
    """Large files in the order in which they are packed."""
    return sorted(files, key=lambda one: (-one.size, one.path))


def is_record(path: str) -> bool:
    """Whether a file lists hashes of others: a RECORD, or a package's file in ``conda-meta``."""
    if not path.endswith(("/RECORD", ".json")):
        return False
    folder, name = posixpath.split(path)
    return (name == "RECORD" and folder.endswith(".dist-info")) or (folder == "conda-meta" and name.endswith(".json"))


def _cut(found: list[tuple[Found, int]], limit: int) -> Iterator[tuple[tuple[Found, ...], int]]:
    """Parts of a package, and their spans."""
    part: list[Found] = []
    total = 0
    for one, span in found:
        if part and total + span > limit:
            yield tuple(part), total
            part, total = [], 0
        part.append(one)
        total += span
    if part:
        yield tuple(part), total


def _span(one: Found) -> int:
    if one.type == "file":
        return tar.file_span(one.path, one.size)
    return tar.link_span(one.path + ("/" if one.type == "dir" else ""), one.target)
