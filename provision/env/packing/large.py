"""Look through a large file, block by block: its hash, where it holds the prefix, and what it needs of a machine."""

from __future__ import annotations

import hashlib
import mmap
import os
from functools import cached_property, partial

from provision.env.bundle.manifest import Mark
from provision.env.packing import reading
from provision.env.packing.marks import Seeking
from provision.env.packing.seal import Traits
from provision.env.relocation import binaries
from provision.env.source import elf, facts
from provision.env.source.scan import Found

BOUND = 256 << 20  # bytes; a larger file is not rewritten: that would need all of it in memory

_BLOCK = 1 << 20
_BEHIND = 256  # bytes that tell whether a source is the end of a longer path
_AHEAD = 4096  # bytes that tell how a path goes on; none is longer
_HEAD = 1 << 16  # bytes, in which the lines that name an interpreter end


class LargeFile:
    """What is learnt of a large file: when all was ``read``, in order, ``marks``, ``digest`` and ``traits`` are known.

    Args:
        found: the file.
        descriptor: it, open.
        seeking: what is sought; None for data.
        bound: the size beyond which a file is not rewritten.

    Attributes:
        is_rewritable: whether it is no larger than that.
    """

    def __init__(self, found: Found, descriptor: int, seeking: Seeking | None, *, bound: int) -> None:
        self._found = found
        self._descriptor = descriptor
        self._seeking = seeking
        self._hash = hashlib.sha256()
        self._texts = seeking.texts if seeking else ()
        longest = max((len(one.text) for one in seeking.search.spellings), default=0) if seeking else 0
        self._overlap = _BEHIND + longest + _AHEAD
        self._buffer = bytearray(self._overlap + _BLOCK)
        self._kept = 0  # bytes of the block before, at the beginning of the buffer
        self._binary = False
        self._at: set[tuple[int, str]] = set()  # where in the head, and any place behind it; and the target
        self._harmful: set[str] = set()  # targets in what a process would load
        self._architectures: frozenset[str] = frozenset()
        self.is_rewritable = found.size <= bound

    def read(self, begin: int, end: int) -> None:
        """Read the bytes from ``begin``, where the last call ended, to ``end``.

        Raises:
            BundleError: the file has become shorter.
            UsageError: it cannot be read.
        """
        with memoryview(self._buffer) as view:
            for offset in range(begin, end, _BLOCK):
                size = min(_BLOCK, end - offset)
                length = self._kept + size
                block = view[self._kept : length]
                reading.fill(block, self._descriptor, offset, self._found)
                self._hash.update(block)
                if self._seeking:
                    self._learn(view[:length], offset - self._kept, is_last=offset + size == self._found.size)
                self._kept = min(self._overlap, length)
                view[: self._kept] = bytes(view[length - self._kept : length])

    @property
    def digest(self) -> str:
        """The file's sha256."""
        return self._hash.hexdigest()

    @property
    def traits(self) -> Traits:
        """What the file tells."""
        return Traits(elf.glibc(partial(_pread, self._descriptor)) if self._seeking else None, self._architectures)

    def marks(self) -> tuple[Mark, ...]:
        """How the file depends on the prefix; one that is too large to be rewritten only where a program may use it.

        Such files are data, or libraries with debug information, where an old path does no harm.
        """
        path = self._found.path
        if self._seeking is None or path.endswith(".pyc"):
            return ()
        if not self.is_rewritable:
            return tuple(Mark("binary", target, self._seeking.rooms.get(path, 0)) for target in sorted(self._harmful))
        return self._seeking.judged(path, self._head, self._at, binary=self._binary)

    def _learn(self, window: memoryview, base: int, *, is_last: bool) -> None:
        """Look through a window of the file, whose first bytes lay in the one before; ``base`` is its offset."""
        self._binary = self._binary or self._buffer.find(0, 0, len(window)) >= 0
        if facts.has_architectures(self._found.path):
            self._architectures |= facts.architectures(window)
        if any(self._buffer.find(text, 0, len(window)) >= 0 for text in self._texts):
            self._search(bytes(window), base, is_last=is_last)

    def _search(self, window: bytes, base: int, *, is_last: bool) -> None:
        """Note where sources are whole; what is too near to an end of the window is another window's."""
        assert self._seeking is not None
        for match, spelling in self._seeking.search.occurrences(window):
            if (base and match.start() < _BEHIND) or (not is_last and match.end() + _AHEAD > len(window)):
                continue
            start = base + match.start()
            self._at.add((min(start, _HEAD), spelling.target))
            loaded = not self.is_rewritable and any(start in part for part in self._loaded)
            if loaded and not binaries.names_source(window, match.end()):
                self._harmful.add(spelling.target)

    @cached_property
    def _head(self) -> bytes:
        return os.pread(self._descriptor, _HEAD, 0)

    @cached_property
    def _loaded(self) -> tuple[range, ...]:
        """The bytes that a process sees; none if this is no program."""
        with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as data:
            return elf.loaded(data) if data[:4] == elf.MAGIC else ()


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    return os.pread(descriptor, size, offset)
