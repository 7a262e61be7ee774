"""Turn a part into compressed chunks. Each file is read once: for its hash, the prefix search and the compressor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from provision.env import chunks, elf, facts, reading, tar
from provision.env.frames import Frame, FrameMaker
from provision.env.manifest import Entry, Mark
from provision.env.prefixes import Search
from provision.env.scan import Found


@dataclass(frozen=True)
class Seeking:
    """What is sought in every file: source paths, conda's placeholders, and scripts for ``/usr/bin/env python``."""

    search: Search
    rooms: Mapping[str, int] = field(default_factory=dict)
    programs: frozenset[bytes] = frozenset()

    def marks(self, found: Found, data: bytes) -> tuple[Mark, ...]:
        """How something depends on where the environment lies."""
        if found.type == "link":
            target = found.target.encode(errors="surrogateescape")
            return tuple(Mark("link", mark.target) for mark in self.search.marks(target))
        if found.type == "dir" or found.path.endswith(".pyc"):
            return ()  # Python corrects the path in a .pyc when it loads it
        programs = self.programs if found.path.startswith("bin/") else frozenset()
        marks = self.search.marks(data, room=self.rooms.get(found.path, 0), programs=programs)
        return (*marks, Mark("record")) if chunks.is_record(found.path) else marks


@dataclass
class Traits:
    """What the files tell about the machine they need; grows as they are read."""

    glibc: tuple[int, int] | None = None
    architectures: set[str] = field(default_factory=set)

    def learn_glibc(self, read: elf.Read) -> None:
        """Note the glibc that an ELF file needs."""
        if needed := elf.glibc(read):
            self.glibc = max(needed, self.glibc or needed)

    def learn_architectures(self, found: Found, data: bytes) -> None:
        """Note the GPU architectures that a library of torch names."""
        if facts.has_architectures(found.path):
            self.architectures |= facts.architectures(data)

    def merge(self, other: Traits) -> None:
        """Add what another part's files told."""
        self.glibc = max(filter(None, (self.glibc, other.glibc)), default=None)
        self.architectures |= other.architectures


@dataclass(frozen=True)
class Sealed:
    """What became of a tar part: its chunk (None if nothing is left for one), and what depends on the prefix."""

    frame: Frame | None
    entries: tuple[Entry, ...]
    marked: tuple[tuple[Entry, bytes], ...]
    traits: Traits


def seal(part: chunks.Part, seeking: Seeking) -> Sealed:
    """Make the tar chunk of a part; files and links that hold the prefix are set aside.

    Raises:
        BundleError: a file changed since the survey.
        UsageError: a file cannot be read.
    """
    maker = FrameMaker("tar")
    traits = Traits()
    entries: list[Entry] = []
    marked: list[tuple[Entry, bytes]] = []
    for found in part.found:
        data = reading.read(found) if found.type == "file" else b""
        entry = entry_of(found, data, seeking.marks(found, data))
        if entry.marks:
            marked.append((entry, data))
        else:
            entries.append(entry)
            maker.add(tar.entry_header(entry), data, bytes(tar.padding(len(data))))
        if data.startswith(elf.MAGIC):
            traits.learn_glibc(partial(_slice, data))
            traits.learn_architectures(found, data)
    return Sealed(maker.finish() if entries else None, tuple(entries), tuple(marked), traits)


def entry_of(found: Found, data: bytes, marks: tuple[Mark, ...]) -> Entry:
    """The manifest's entry for something that was found and read."""
    digest = hashlib.sha256(data).hexdigest() if found.type == "file" else ""
    return Entry(found.path, found.type, found.mode, found.mtime, found.size, digest, found.target, marks=marks)


def _slice(data: bytes, offset: int, size: int) -> bytes:
    return data[offset : offset + size]
