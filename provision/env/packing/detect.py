"""Detect how a file depends on the prefix: with its content in memory, or block by block for a large file."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

from provision.env import relocation
from provision.env.bundle.manifest import Mark
from provision.env.relocation import Search
from provision.env.source import elf, files
from provision.env.source.environment import find_architectures, has_architectures, is_record
from provision.env.source.files import Source

REWRITABLE = 256 << 20  # bytes; a larger file is not rewritten, since that needs all of it in memory

_LONG_TEXT = 16  # bytes; searching for a shorter text takes as long as searching for several longer ones
BLOCK = 1 << 20  # bytes of a large file that are searched at once
_BEFORE = 256  # bytes before a match that decide whether it is the end of a longer path
_AFTER = 4096  # bytes after a match that show how the path continues; no path is longer
_HEAD = 1 << 16  # bytes in which the lines with a script's interpreter end


class Traits(NamedTuple):
    """What files need from a machine: the newest glibc, and GPU architectures."""

    glibc: tuple[int, int] | None = None
    architectures: frozenset[str] = frozenset()

    def merged(self, other: Traits) -> Traits:
        """What both need together."""
        glibc = max(filter(None, (self.glibc, other.glibc)), default=None)
        return Traits(glibc, self.architectures | other.architectures)


@dataclass(frozen=True)
class PrefixDetector:
    """Finds the source paths in files.

    Attributes:
        search: the source paths.
        rooms: the length of conda's placeholder in a binary, by path.
        programs: names in ``bin``. A script in ``bin`` that asks ``/usr/bin/env`` for one of them works only in an
            activated environment: its interpreter is rewritten like all others.
    """

    search: Search
    rooms: Mapping[str, int] = field(default_factory=dict)
    programs: frozenset[bytes] = frozenset()

    def find_marks(self, source: Source, data: bytes) -> tuple[Mark, ...]:
        """How a source with the content ``data`` depends on the prefix; empty if it does not."""
        if source.type == "link":
            return self._link_marks(source.target)
        if source.type in ("dir", "hard") or source.path.endswith(".pyc"):
            return ()  # Python corrects the path in a .pyc file when it loads it
        at = [(match.start(), spelling.target) for match, spelling in self.search.occurrences(data)]
        return self.file_marks(source.path, data, at, binary=bool(at) and b"\0" in data)

    def file_marks(self, path: str, head: bytes, at: Iterable[tuple[int, str]], *, binary: bool) -> tuple[Mark, ...]:
        """The marks of a file.

        Args:
            path: the file.
            head: its beginning.
            at: where it contains source paths: offsets, and the targets of their relocations.
            binary: whether it contains a NUL byte.
        """
        record = (Mark("record"),) if is_record(path) else ()
        wanted = relocation.env_program(head) if path.startswith("bin/") else None
        script = {Mark("shebang")} if wanted and wanted[0] in self.programs else set()
        at = tuple(at)
        if at and binary:
            room = self.rooms.get(path, 0)
            return (*sorted({Mark("binary", target, room) for _, target in at}), *record)
        end = relocation.head_end(head) if at else 0
        kinds = {Mark("shebang" if start < end else "text", target) for start, target in at}
        return (*sorted(kinds | script), *record)

    def may_have_marks(self, path: str, data: bytearray, begin: int, end: int) -> bool:
        """Quickly rule out nearly all files: False if a file with the content ``data[begin:end]`` has no marks."""
        if path.endswith(".pyc"):
            return False
        for text in self.texts:
            if data.find(text, begin, end) >= 0:
                return True
        return is_record(path) or (path.startswith("bin/") and data.startswith(b"#!", begin, end))

    @cached_property
    def texts(self) -> tuple[bytes, ...]:
        """Texts to search for first: a file without them has no source path. Usually one common beginning of all."""
        texts = tuple(spelling.text for spelling in self.search.spellings)
        alike = takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
        common = bytes(column[0] for column in alike)
        return (common,) if len(common) >= _LONG_TEXT else texts

    def _link_marks(self, target: str) -> tuple[Mark, ...]:
        """A link depends on the prefix if its target starts with it and does not leave it again through ``..``."""
        path = os.fsencode(target)
        normal = os.path.normpath(path)
        return tuple(
            Mark("link", spelling.target)
            for match, spelling in self.search.occurrences(path)
            if match.start() == 0 and (normal == match[0] or normal.startswith(match[0] + b"/"))
        )


class LargeFile:
    """Reads a large file block by block. After all blocks, ``marks``, ``digest`` and ``traits`` are known.

    Args:
        source: the file.
        descriptor: the open file.
        detector: finds the prefix in it; None for data.
        rewritable: bytes of the largest file that can be rewritten.

    Attributes:
        is_rewritable: whether the file can be rewritten.
    """

    def __init__(self, source: Source, descriptor: int, detector: PrefixDetector | None, *, rewritable: int) -> None:
        self._source = source
        self._descriptor = descriptor
        self._detector = detector
        self._hash = hashlib.sha256()
        self._texts = detector.texts if detector else ()
        longest = max((len(one.text) for one in detector.search.spellings), default=0) if detector else 0
        self._overlap = _BEFORE + longest + _AFTER
        self._buffer = bytearray(self._overlap + BLOCK)
        self._kept = 0  # bytes of the previous block at the beginning of the buffer
        self._binary = False
        self._at: set[tuple[int, str]] = set()  # offset and target; offsets beyond the head count as _HEAD
        self._harmful: set[str] = set()  # targets in bytes that a process loads
        self._architectures: frozenset[str] = frozenset()
        self.is_rewritable = source.size <= rewritable

    def read(self, begin: int, end: int) -> None:
        """Read the bytes from ``begin``, where the previous call ended, to ``end``.

        Raises:
            BundleError: the file became shorter.
            UsageError: it cannot be read.
        """
        with memoryview(self._buffer) as view:
            for offset in range(begin, end, BLOCK):
                size = min(BLOCK, end - offset)
                length = self._kept + size
                block = view[self._kept : length]
                files.fill(block, self._descriptor, offset, self._source)
                self._hash.update(block)
                if self._detector:
                    self._examine(view[:length], offset - self._kept, is_last=offset + size == self._source.size)
                self._kept = min(self._overlap, length)
                view[: self._kept] = bytes(view[length - self._kept : length])

    @property
    def digest(self) -> str:
        """The sha256 of the file."""
        return self._hash.hexdigest()

    @property
    def traits(self) -> Traits:
        """The file's requirements of a machine."""
        return Traits(elf.glibc(partial(_pread, self._descriptor)) if self._detector else None, self._architectures)

    def marks(self) -> tuple[Mark, ...]:
        """How the file depends on the prefix. A file too large to rewrite is marked only if a program may use the path.

        Such files are data, or libraries whose debug information has old paths that do no harm.
        """
        path = self._source.path
        if self._detector is None or path.endswith(".pyc"):
            return ()
        if not self.is_rewritable:
            return tuple(Mark("binary", target, self._detector.rooms.get(path, 0)) for target in sorted(self._harmful))
        head = os.pread(self._descriptor, _HEAD, 0)
        return self._detector.file_marks(path, head, self._at, binary=self._binary)

    def _examine(self, window: memoryview, base: int, *, is_last: bool) -> None:
        """Search a window of the file at offset ``base``. It starts with the end of the previous window."""
        self._binary = self._binary or self._buffer.find(0, 0, len(window)) >= 0
        if has_architectures(self._source.path):
            self._architectures |= find_architectures(window)
        if any(self._buffer.find(text, 0, len(window)) >= 0 for text in self._texts):
            self._search(bytes(window), base, is_last=is_last)

    def _search(self, window: bytes, base: int, *, is_last: bool) -> None:
        """Record the source paths in a window, except near its ends: those are in another window too."""
        assert self._detector is not None
        for match, spelling in self._detector.search.occurrences(window):
            if (base and match.start() < _BEFORE) or (not is_last and match.end() + _AFTER > len(window)):
                continue
            start = base + match.start()
            self._at.add((min(start, _HEAD), spelling.target))
            loaded = not self.is_rewritable and any(start in part for part in self._loaded)
            if loaded and not relocation.names_source(window, match.end()):
                self._harmful.add(spelling.target)

    @cached_property
    def _loaded(self) -> tuple[range, ...]:
        """The bytes that a process loads; empty if the file is not ELF."""
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as data:
            return elf.loaded_ranges(data) if data[:4] == elf.MAGIC else ()


def find_traits(path: str, data: memoryview) -> Traits:
    """One file's requirements of a machine."""
    return Traits(
        elf.glibc(partial(_slice, data)) if data[:4] == elf.MAGIC else None,
        find_architectures(data) if has_architectures(path) else frozenset(),
    )


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)


def _slice(data: memoryview, offset: int, size: int) -> bytes:
    return bytes(data[offset : offset + size])
