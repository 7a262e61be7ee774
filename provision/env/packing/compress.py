"""Compress chunks. Each file is read once: for its hash, the search for the prefix, and the compressor.

zstd's own checksums are off: sha256 covers every compressed byte and every file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import zstandard

from provision.env.bundle import keys, tar
from provision.env.bundle.manifest import Mark
from provision.env.packing import reading
from provision.env.packing.detect import PrefixDetector, Traits, find_traits
from provision.env.packing.plan import Group, Range
from provision.env.relocation.prefixes import Search
from provision.env.source import elf, facts, scan
from provision.env.source.scan import Source

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
        traits: what the files need from a machine.
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
            key=keys.of_records(stream.records),
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
            with reading.open_source(part.source) as descriptor:
                reading.fill(view, descriptor, part.offset, part.source)
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
        header = tar.header(name, size=size, mode=mode, mtime=scan.seconds(source.mtime_ns))
        begin = self.end + len(header)
        end = begin + size
        content = view[begin:end]
        reading.read_into(content, source)
        digest = hashlib.sha256(content).hexdigest()
        self.digests[number] = digest
        if not self._verbatim:
            if buffer.startswith(elf.MAGIC, begin, end) or facts.has_architectures(path):
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
        content_digest = keys.content_digest(path, content) if keys.has_source_time(path, content) else digest
        self.records.append(keys.record(name, "file", mode, content_digest.encode()))

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
        self.records.append(keys.record(path, source.type, source.mode, target))
