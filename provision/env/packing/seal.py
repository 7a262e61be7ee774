"""Turn a part into a compressed chunk. Each file is read once: for its hash, the prefix search and the compressor."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from typing import NamedTuple

from provision.env.bundle import keys, tar
from provision.env.bundle.manifest import Mark
from provision.env.packing import frames, reading
from provision.env.packing.chunks import Part
from provision.env.packing.marks import Seeking
from provision.env.relocation.prefixes import Search
from provision.env.source import elf, facts, scan
from provision.env.source.scan import Found

_ZEROS = bytes(tar.BLOCK)


class Traits(NamedTuple):
    """What files tell about the machine they need: the newest glibc, and the GPU architectures."""

    glibc: tuple[int, int] | None = None
    architectures: frozenset[str] = frozenset()

    def merged(self, other: Traits) -> Traits:
        """What both tell."""
        glibc = max(filter(None, (self.glibc, other.glibc)), default=None)
        return Traits(glibc, self.architectures | other.architectures)


class Sealed(NamedTuple):
    """What is known of a compressed chunk and of its files.

    Attributes:
        digest: as in ``manifest.Chunk``, as are the next three; without a size nothing was left for a chunk.
        key: of a range it is not known before the whole file is.
        digests: the sha256 of each of the part's files, one after the other, 64 digits each.
        marked: what depends on the prefix and is in no chunk: its place in the part, its marks, and its bytes.
        traits: what the files told.
    """

    digest: str
    key: str
    size: int
    compressed: int
    digests: str = ""
    marked: tuple[tuple[int, tuple[Mark, ...], bytes], ...] = ()
    traits: Traits = Traits()


class Sealer:
    """Seals one chunk after the other in the same memory; gives what is known of each, and its frame.

    Attributes:
        seeking: what is sought in files.
    """

    def __init__(self) -> None:
        self.seeking = Seeking(Search(()))
        self._buffer = bytearray()

    def part(self, part: Part) -> tuple[Sealed, bytes]:
        """Make the tar chunk of a part; files and links that hold the prefix are set aside.

        Raises:
            BundleError: a file changed since the survey.
            UsageError: a file cannot be read.
        """
        if part.span > len(self._buffer):
            self._buffer = bytearray(part.span)
        stream = _Stream(self._buffer, self.seeking, verbatim=part.verbatim)
        with memoryview(self._buffer) as view:
            for number, found in enumerate(part.found):
                if found.type == "file":
                    stream.add_file(number, found, view)
                else:
                    stream.add_name(number, found)
            data = frames.compress(view[: stream.end]) if stream.end else b""
            sealed = Sealed(
                hashlib.sha256(data).hexdigest(),
                keys.of_records(stream.records),
                stream.end,
                len(data),
                "".join(stream.digests),
                tuple(stream.marked),
                stream.traits,
            )
        return sealed, data

    def range(self, found: Found, offset: int, size: int) -> tuple[Sealed, bytes]:
        """Make a raw chunk of a range of a large file.

        Raises:
            BundleError: the file changed since the survey.
            UsageError: it cannot be read.
        """
        if size > len(self._buffer):
            self._buffer = bytearray(size)
        with memoryview(self._buffer)[:size] as view:
            with reading.opened(found) as descriptor:
                reading.fill(view, descriptor, offset, found)
            data = frames.compress(view)
        return Sealed(hashlib.sha256(data).hexdigest(), "", size, len(data)), data


class _Stream:
    """The tar stream of a part while it grows in a buffer."""

    def __init__(self, buffer: bytearray, seeking: Seeking, *, verbatim: bool) -> None:
        self.end = 0
        self.records: list[bytes] = []
        self.digests: list[str] = []
        self.marked: list[tuple[int, tuple[Mark, ...], bytes]] = []
        self.traits = Traits()
        self._buffer = buffer
        self._seeking = seeking
        self._verbatim = verbatim

    def add_file(self, number: int, found: Found, view: memoryview) -> None:
        """Read a file to where it would lie in the stream; it stays there if it does not depend on the prefix."""
        path, _, _, mode, mtime_ns, size, *_ = found
        name = os.fsencode(path)
        buffer = self._buffer
        header = tar.header(name, size=size, mode=mode, mtime=scan.seconds(mtime_ns))
        begin = self.end + len(header)
        end = begin + size
        content = view[begin:end]
        reading.read_into(content, found)
        digest = hashlib.sha256(content).hexdigest()
        self.digests.append(digest)
        if not self._verbatim:
            if buffer.startswith(elf.MAGIC, begin, end) or facts.has_architectures(path):
                self.traits = self.traits.merged(traits(found, content))
            if self._seeking.maybe(path, buffer, begin, end):
                data = bytes(content)
                if marks := self._seeking.marks(found, data):
                    self.marked.append((number, marks, data))
                    return
        buffer[self.end : begin] = header
        padding = -size % tar.BLOCK
        buffer[end : end + padding] = _ZEROS[:padding]
        self.end = end + padding
        told = keys.content(path, content) if keys.is_timed(path, content) else digest
        self.records.append(keys.record(name, "file", mode, told.encode()))

    def add_name(self, number: int, found: Found) -> None:
        """Add a link or a folder; a symlink into the prefix is set aside."""
        if not self._verbatim and (marks := self._seeking.marks(found, b"")):
            self.marked.append((number, marks, b""))
            return
        target = os.fsencode(found.target)
        path = os.fsencode(found.path)
        name = path + b"/" if found.type == "dir" else path
        header = tar.header(name, mode=found.mode, mtime=found.mtime, kind=tar.TYPES[found.type], target=target)
        begin, self.end = self.end, self.end + len(header)
        self._buffer[begin : self.end] = header
        self.records.append(keys.record(path, found.type, found.mode, target))


def traits(found: Found, data: memoryview) -> Traits:
    """What one file tells."""
    return Traits(
        elf.glibc(partial(_slice, data)) if data[:4] == elf.MAGIC else None,
        facts.architectures(data) if facts.has_architectures(found.path) else frozenset(),
    )


def _slice(data: memoryview, offset: int, size: int) -> bytes:
    return bytes(data[offset : offset + size])
