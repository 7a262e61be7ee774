"""Turn a part into compressed chunks. Each file is read once: for its hash, the prefix search and the compressor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from provision.env import elf, facts, reading, tar
from provision.env.chunks import Part
from provision.env.frames import Frame, FrameMaker
from provision.env.manifest import Entry, Mark
from provision.env.marks import Seeking
from provision.env.scan import Found


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
    """What became of a tar part.

    Attributes:
        frame: its chunk; None if nothing was left for one.
        digests: the sha256 of each of its files, empty for links and folders, in the part's order.
        marked: what depends on the prefix and is in no chunk: by its place in the part, its marks and its bytes.
        traits: what its files told.
    """

    frame: Frame | None
    digests: tuple[str, ...]
    marked: Mapping[int, tuple[tuple[Mark, ...], bytes]]
    traits: Traits


def seal(part: Part, seeking: Seeking) -> Sealed:
    """Make the tar chunk of a part; files and links that hold the prefix are set aside.

    Raises:
        BundleError: a file changed since the survey.
        UsageError: a file cannot be read.
    """
    maker = FrameMaker("tar")
    traits = Traits()
    digests: list[str] = []
    marked: dict[int, tuple[tuple[Mark, ...], bytes]] = {}
    for number, found in enumerate(part.found):
        data = reading.read(found) if found.type == "file" else b""
        digests.append(hashlib.sha256(data).hexdigest() if found.type == "file" else "")
        if marks := seeking.marks(found, data):
            marked[number] = (marks, data)
        else:
            maker.add(tar.entry_header(entry_of(found, digests[-1])), data, bytes(tar.padding(len(data))))
        if data.startswith(elf.MAGIC):
            traits.learn_glibc(partial(_slice, data))
        traits.learn_architectures(found, data)
    frame = maker.finish() if len(marked) < len(part.found) else None
    return Sealed(frame, tuple(digests), marked, traits)


def entry_of(found: Found, digest: str, *, chunks: tuple[int, ...] = (), marks: tuple[Mark, ...] = ()) -> Entry:
    """The manifest's entry for something that was found and read."""
    return Entry(
        found.path,
        found.type,
        found.mode,
        found.mtime,
        found.size,
        digest,
        found.target,
        chunks,
        raw=len(chunks) > 1,
        marks=marks,
    )


def _slice(data: bytes, offset: int, size: int) -> bytes:
    return data[offset : offset + size]
