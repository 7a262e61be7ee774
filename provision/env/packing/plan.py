"""Divide an environment's files into chunks, before any file is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS
from provision.env.source.packages import source_of
from provision.env.source.scan import Source

LIMIT = 16 << 20  # bytes of a tar chunk, and of a range of a large file: a worker holds as much in memory

_Member = tuple[str, Source, int]  # the path of its .py file or its own path, the source, its span


@dataclass(frozen=True)
class Group:
    """Files that become one tar chunk.

    Attributes:
        package: the package of the chunk.
        sources: the members, in the order of the stream.
        span: bytes of the stream if no member is removed from it.
        size: bytes of all files.
        verbatim: the files are data and are not searched for the prefix.
    """

    package: str
    sources: tuple[Source, ...]
    span: int
    size: int
    verbatim: bool = False


@dataclass(frozen=True)
class Range:
    """A range of a large file, which becomes one raw chunk."""

    source: Source
    offset: int
    size: int


@dataclass(frozen=True)
class Plan:
    """Chunks in the order of the bundle.

    Attributes:
        large: files that become raw chunks, the largest first.
        groups: tar chunks, the largest first. The last one has all hard links and folders.
    """

    large: tuple[Source, ...]
    groups: tuple[Group, ...]


def plan_chunks(
    sources: Iterable[Source], owner: Callable[[str], str], *, limit: int = LIMIT, verbatim: Collection[str] = ()
) -> Plan:
    """Divide sources into chunks.

    Only the files of a package decide how the package is divided: a change to one package keeps the chunks of all
    others. Large chunks come first, to keep all processors busy until the end.

    Args:
        sources: everything to pack.
        owner: returns the package of a path.
        limit: bytes of a chunk. A .py file and its .pyc files stay together even if they are larger.
        verbatim: packages that are data.
    """
    large: list[Source] = []
    packages: defaultdict[str, list[_Member]] = defaultdict(list)
    hard: list[Source] = []
    folders: list[Source] = []
    ordered = sorted(sources)
    paths = {one.path for one in ordered}
    links = {one.path: one.target for one in ordered if one.type == "hard"}
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
                path = links.get(source, source)  # same package, same chunk
            packages[owner(path)].append((path, one, span))
    groups = [
        _group(package, members, span, verbatim=package in verbatim)
        for package in packages
        for members, span in _divide(packages[package], limit)
    ]
    groups.sort(key=lambda group: (-group.span, group.sources[0].path))
    if last := (*hard, *reversed(folders)):
        groups.append(_group(FOLDERS, last, sum(map(_span, last))))
    return Plan(tuple(_largest_first(large)), tuple(groups))


def large_files(sources: Iterable[Source], limit: int) -> list[Source]:
    """The files that become raw chunks, in their order."""
    files = (one for one in sources if one.type == "file" and one.size + tar.BLOCK > limit)
    return _largest_first([one for one in files if _span(one) > limit])


def split_ranges(source: Source, limit: int) -> list[Range]:
    """The ranges of a large file."""
    return [Range(source, begin, min(limit, source.size - begin)) for begin in range(0, source.size, limit)]


def _group(package: str, sources: tuple[Source, ...], span: int, *, verbatim: bool = False) -> Group:
    return Group(package, sources, span, sum(one.size for one in sources), verbatim)


def _largest_first(files: Iterable[Source]) -> list[Source]:
    return sorted(files, key=lambda one: (-one.size, one.path))


def _divide(members: list[_Member], limit: int) -> Iterator[tuple[tuple[Source, ...], int]]:
    """The groups of a package and their spans, each sorted by path.

    A .pyc file is in the group of its .py file, whose mtime it contains: a node may already have one chunk of a
    package, from a release with other times, and receive only the next.
    """
    spans: defaultdict[str, int] = defaultdict(int)
    for source, _, span in members:
        spans[source] += span
    totals = [0]
    numbers = {}  # source -> number of its group
    for source in sorted(spans):
        if totals[-1] and totals[-1] + spans[source] > limit:
            totals.append(0)
        totals[-1] += spans[source]
        numbers[source] = len(totals) - 1
    groups: list[list[Source]] = [[] for _ in totals]
    for source, one, _ in members:
        groups[numbers[source]].append(one)
    yield from zip(map(tuple, groups), totals, strict=True)


def _span(one: Source) -> int:
    if one.type == "file":
        return tar.file_span(one.path, one.size)
    return tar.link_span(one.path + ("/" if one.type == "dir" else ""), one.target)
