"""Divide an environment's files into chunks, and compress the chunks.

Each file is read once: for its hash, the search for the prefix, and the compressor. zstd's own checksums are off:
sha256 covers every compressed byte and every file.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import zstandard

from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS, Mark, content_digest, has_source_time, key_of_records, key_record
from provision.env.packing.detect import PrefixDetector, Traits, find_traits
from provision.env.relocation import Search
from provision.env.source import elf, files
from provision.env.source.environment import has_architectures, source_of
from provision.env.source.files import Source

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


def large_ranges(sources: Iterable[Source], limit: int) -> Iterator[Range]:
    """The ranges of all files that become raw chunks, in the order of the bundle."""
    files = (one for one in sources if one.type == "file" and one.size + tar.BLOCK > limit)
    for one in _largest_first(one for one in files if _span(one) > limit):
        yield from split_ranges(one, limit)


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


# Level 2 with tables for chunks of up to 16 MiB. For the small files of a 2.2 GB environment with torch for the CPU,
# the result is 2.5 % larger than with level 3, zstd's default, and takes 15 % less time. Beyond that, packing takes
# longer than most networks save.
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(2, window_log=22, hash_log=17, min_match=6)

_BLOCK = 1 << 20  # bytes that Frame passes on at once
_ZEROS = bytes(tar.BLOCK)


class MarkedContent(NamedTuple):
    """A source that depends on the prefix and is therefore in no chunk: its marks and its content."""

    marks: tuple[Mark, ...]
    content: bytes


@dataclass(frozen=True)
class PackedChunk:
    """A compressed chunk and what is known of its files.

    Attributes:
        kind: ``tar`` or ``raw``, as in ``manifest.Chunk``, like the next three.
        digest: sha256 of ``data``.
        key: empty for a range: it depends on the sha256 of the whole file.
        size: bytes uncompressed; 0 if every source depends on the prefix.
        data: the compressed bytes.
        digests: the sha256 of each file of the group, by its number in the group.
        marked: sources that depend on the prefix, by number in the group.
        traits: the files' requirements of a machine.
    """

    kind: Literal["tar", "raw"]
    digest: str
    key: str
    size: int
    data: bytes | bytearray
    digests: Mapping[int, str] = field(default_factory=dict)
    marked: Mapping[int, MarkedContent] = field(default_factory=dict)
    traits: Traits = field(default_factory=Traits)


class Compressor:
    """Compresses one chunk after the other in the same memory.

    Attributes:
        detector: finds the prefix in the files of groups.
    """

    def __init__(self) -> None:
        self.detector = PrefixDetector(Search(()))
        self._buffer = bytearray()
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)

    def compress_group(self, group: Group) -> PackedChunk:
        """Compress the tar stream of a group, without the sources that depend on the prefix.

        Raises:
            BundleError: a file changed since the survey.
            UsageError: a file cannot be read.
        """
        stream = _Stream(self._reserve(group.span), self.detector, verbatim=group.verbatim)
        with memoryview(self._buffer) as view:
            for number, source in enumerate(group.sources):
                if source.type == "file":
                    stream.add_file(number, source, view)
                else:
                    stream.add_name(number, source)
            data = self._zstd.compress(view[: stream.end]) if stream.end else b""
        return PackedChunk(
            kind="tar",
            digest=hashlib.sha256(data).hexdigest(),
            key=key_of_records(stream.records),
            size=stream.end,
            data=data,
            digests=stream.digests,
            marked=stream.marked,
            traits=stream.traits,
        )

    def compress_range(self, part: Range) -> PackedChunk:
        """Compress a range of a large file; errors as for ``compress_group``."""
        self._reserve(part.size)
        with memoryview(self._buffer)[: part.size] as view:
            with files.open_source(part.source) as descriptor:
                files.fill(view, descriptor, part.offset, part.source)
            data = self._zstd.compress(view)
        return PackedChunk("raw", hashlib.sha256(data).hexdigest(), "", part.size, data)

    def _reserve(self, size: int) -> bytearray:
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        return self._buffer


class Frame:
    """Compresses one member of the bundle block by block.

    Attributes:
        size: bytes added.
        compressed: bytes returned.
    """

    def __init__(self) -> None:
        self.size = 0
        self.compressed = 0
        self._hash = hashlib.sha256()
        self._zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()
        self._waiting = bytearray()

    @property
    def digest(self) -> str:
        """The sha256 of the returned bytes, after ``finish``."""
        return self._hash.hexdigest()

    def add(self, data: bytes) -> bytes:
        """Add bytes, and return compressed ones; often none, since small blocks are gathered first."""
        self._waiting += data
        return self._drain() if len(self._waiting) >= _BLOCK else b""

    def finish(self) -> bytes:
        """The end of the frame."""
        return self._drain() + self._count(self._zstd.flush())

    def _drain(self) -> bytes:
        data, self._waiting = bytes(self._waiting), bytearray()
        self.size += len(data)
        return self._count(self._zstd.compress(data))

    def _count(self, block: bytes) -> bytes:
        self.compressed += len(block)
        self._hash.update(block)
        return block


class _Stream:
    """The tar stream of a group, built in a buffer."""

    def __init__(self, buffer: bytearray, detector: PrefixDetector, *, verbatim: bool) -> None:
        self.end = 0
        self.records: list[bytes] = []
        self.digests: dict[int, str] = {}
        self.marked: dict[int, MarkedContent] = {}
        self.traits = Traits()
        self._buffer = buffer
        self._detector = detector
        self._verbatim = verbatim

    def add_file(self, number: int, source: Source, view: memoryview) -> None:
        """Read a file into its place in the stream. It stays there if it does not depend on the prefix."""
        path, size, mode = source.path, source.size, source.mode
        name = os.fsencode(path)
        buffer = self._buffer
        header = tar.header(name, size=size, mode=mode, mtime=files.seconds(source.mtime_ns))
        begin = self.end + len(header)
        end = begin + size
        content = view[begin:end]
        files.read_into(content, source)
        digest = hashlib.sha256(content).hexdigest()
        self.digests[number] = digest
        if not self._verbatim:
            if buffer.startswith(elf.MAGIC, begin, end) or has_architectures(path):
                self.traits = self.traits.merged(find_traits(path, content))
            if self._detector.may_have_marks(path, buffer, begin, end):
                data = bytes(content)
                if marks := self._detector.find_marks(source, data):
                    self.marked[number] = MarkedContent(marks, data)
                    return
        buffer[self.end : begin] = header
        padding = -size % tar.BLOCK
        buffer[end : end + padding] = _ZEROS[:padding]
        self.end = end + padding
        content_hash = content_digest(path, content) if has_source_time(path, content) else digest
        self.records.append(key_record(name, "file", mode, content_hash.encode()))

    def add_name(self, number: int, source: Source) -> None:
        """Add a link or a folder, unless it is a symlink into the prefix."""
        if not self._verbatim and (marks := self._detector.find_marks(source, b"")):
            self.marked[number] = MarkedContent(marks, b"")
            return
        target = os.fsencode(source.target)
        path = os.fsencode(source.path)
        name = path + b"/" if source.type == "dir" else path
        header = tar.header(name, mode=source.mode, mtime=source.mtime, kind=tar.TYPES[source.type], target=target)
        begin, self.end = self.end, self.end + len(header)
        self._buffer[begin : self.end] = header
        self.records.append(key_record(path, source.type, source.mode, target))
