"""Plan the chunks: which files are packed together, before any is read."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS
from provision.env.source.owners import source_of
from provision.env.source.scan import Found

LIMIT = 16 << 20  # bytes of a tar chunk, and of a range of a large file: what a worker holds in memory


_Member = tuple[str, Found, int]  # the path of what it was compiled from, or its own; what was found; its span


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
        limit: bytes of a chunk; only a source and its compiled files take more together.
        verbatim: packages that are data.
    """
    large: list[Found] = []
    packages: defaultdict[str, list[_Member]] = defaultdict(list)
    hard: list[Found] = []
    folders: list[Found] = []
    ordered = sorted(found)
    paths = {one.path for one in ordered}
    others = {one.path: one.target for one in ordered if one.type == "hard"}
    for one in ordered:
        if one.type == "dir":
            folders.append(one)
        elif one.type == "hard":
            hard.append(one)
        elif (span := _span(one)) > limit and one.type == "file":
            large.append(one)
        else:
            path = one.path
            if path.endswith(".pyc") and (source := source_of(path)) in paths:
                path = others.get(source, source)  # they belong together, and to the same package
            packages[owner(path)].append((path, one, span))
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


def _cut(members: list[_Member], limit: int) -> Iterator[tuple[tuple[Found, ...], int]]:
    """Parts of a package, and their spans, each part sorted by path.

    A compiled file lies in the part of its source, whose time it holds: a node may have one chunk of a package from
    another release, where all times are others, and be sent the next.
    """
    spans: defaultdict[str, int] = defaultdict(int)
    for source, _, span in members:
        spans[source] += span
    totals = [0]
    number = {}  # of the part, by source
    for source in sorted(spans):
        if totals[-1] and totals[-1] + spans[source] > limit:
            totals.append(0)
        totals[-1] += spans[source]
        number[source] = len(totals) - 1
    parts: list[list[Found]] = [[] for _ in totals]
    for source, one, _ in members:
        parts[number[source]].append(one)
    yield from zip(map(tuple, parts), totals, strict=True)


def _span(one: Found) -> int:
    if one.type == "file":
        return tar.file_span(one.path, one.size)
    return tar.link_span(one.path + ("/" if one.type == "dir" else ""), one.target)
