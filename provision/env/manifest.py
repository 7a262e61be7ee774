"""What a bundle holds: the frozen nouns of the manifest, and their JSON and digest."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

FORMAT = 1

EntryType = Literal["file", "link", "dir"]
MarkKind = Literal["shebang", "text", "binary", "link", "record"]
PackageKind = Literal["conda", "pypi", "editable"]


class Mark(NamedTuple):
    """How a file holds a source path.

    Attributes:
        kind: ``shebang`` (its interpreter), ``text``, ``binary``, ``link`` (a symlink's target), or ``record``:
            a list of hashes (RECORD, conda-meta) that must be made true when the files it lists are rewritten.
        target: which relocation it is: the path relative to the prefix, empty for the prefix itself.
        room: bytes that conda reserved for the prefix in a binary (the length of its placeholder); 0 elsewhere.
    """

    kind: MarkKind
    target: str = ""
    room: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, symlink or folder of the environment; ``path`` is relative to the prefix.

    ``chunks`` names one tar chunk, or the raw ranges of a large file in order (``raw``). An entry with marks is in no
    chunk: a file lies among the prefix files, a link is complete as it stands here.
    """

    path: str
    type: EntryType
    mode: int
    mtime: int
    size: int = 0
    sha256: str = ""
    target: str = ""
    chunks: tuple[int, ...] = ()
    raw: bool = False
    marks: tuple[Mark, ...] = ()

    def to_json(self, *, chunk: bool = True) -> dict[str, Any]:
        """The entry as the manifest has it; without the place where its bytes lie if ``chunk`` is false."""
        data: dict[str, Any] = {"path": self.path, "type": self.type, "mode": self.mode, "mtime": self.mtime}
        if self.type == "file":
            data |= {"size": self.size, "sha256": self.sha256}
        if self.type == "link":
            data["target"] = self.target
        if self.chunks and chunk:
            data["chunk"] = list(self.chunks) if self.raw else self.chunks[0]
        if self.marks:
            data["prefix"] = [[m.kind, m.target, *([m.room] if m.room else [])] for m in self.marks]
        return data


@dataclass(frozen=True, slots=True)
class Chunk:
    """One compressed member of the bundle.

    Attributes:
        digest: sha256 of the uncompressed bytes.
        kind: ``tar``, a stream of whole members without closing blocks, or ``raw``, a range of one file.
        package: the package it belongs to, or a folder (with a slash at its end) of files that no package owns.
        size: bytes uncompressed.
        compressed: bytes in the bundle.
        offset: where they begin in the bundle.
        sha256: of the compressed bytes, so that a relay without zstd can verify them.
    """

    digest: str
    kind: Literal["tar", "raw"]
    package: str
    size: int
    compressed: int
    offset: int
    sha256: str

    @property
    def member(self) -> str:
        """The chunk's name in the bundle."""
        return f"data/{self.digest}.{'tar.zst' if self.kind == 'tar' else 'zst'}"

    def to_json(self) -> dict[str, Any]:
        """The chunk as the manifest has it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class PrefixFiles:
    """Where the member ``prefix-files.tar.zst`` lies; fields as in ``Chunk``."""

    digest: str
    size: int
    compressed: int
    offset: int
    sha256: str

    member = "prefix-files.tar.zst"

    def to_json(self) -> dict[str, Any]:
        """The member as the manifest has it."""
        return dict(vars(self))


@dataclass(frozen=True)
class Package:
    """A distribution that the environment holds."""

    name: str
    version: str
    kind: PackageKind

    def to_json(self) -> dict[str, Any]:
        """The package as the manifest has it."""
        return dict(vars(self))


@dataclass(frozen=True)
class Manifest:
    """Everything that is known about a bundle. ``files`` are sorted by path; ``relocations`` end with the prefix."""

    name: str
    tool: str
    created: str
    platform: str
    python: str
    source_prefix: str
    chunks: tuple[Chunk, ...]
    prefix_files: PrefixFiles
    files: tuple[Entry, ...]
    relocations: tuple[tuple[str, str], ...]
    packages: tuple[Package, ...] = ()
    glibc: str | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    gpu_architectures: tuple[str, ...] | None = None
    notices: tuple[str, ...] = ()
    format: int = FORMAT

    @cached_property
    def digest(self) -> str:
        """The identity of the environment: equal for equal trees, however they were packed."""
        files = [entry.to_json(chunk=False) for entry in self.files]
        return hashlib.sha256(
            canonical({"platform": self.platform, "source_prefix": self.source_prefix, "files": files})
        ).hexdigest()

    @property
    def release_id(self) -> str:
        """The name of a release of this environment on a node."""
        return self.digest[:12]

    def members(self, chunk: int) -> tuple[Entry, ...]:
        """The entries of a tar chunk in the order of its stream (``stream_order``)."""
        return self._members.get(chunk, ())

    @cached_property
    def _members(self) -> dict[int, tuple[Entry, ...]]:
        found: defaultdict[int, list[Entry]] = defaultdict(list)
        for entry in self.files:
            if entry.chunks and not entry.raw:
                found[entry.chunks[0]].append(entry)
        return {index: stream_order(entries) for index, entries in found.items()}

    @property
    def stored(self) -> tuple[Chunk | PrefixFiles, ...]:
        """Everything that lies compressed in the bundle, in its order."""
        return (*self.chunks, self.prefix_files)

    @property
    def marked(self) -> tuple[Entry, ...]:
        """The entries that depend on where the environment lies."""
        return tuple(entry for entry in self.files if entry.marks)

    def to_json(self) -> bytes:
        """The member ``manifest.json``: ASCII, sorted keys."""
        data = dict(vars(self)) | {
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "files": [entry.to_json() for entry in self.files],
            "packages": [package.to_json() for package in self.packages],
            "prefix_files": self.prefix_files.to_json(),
        }
        return canonical({key: value for key, value in data.items() if key not in ("digest", "_members")})


def stream_order(entries: list[Entry]) -> tuple[Entry, ...]:
    """Sort the members of a tar stream: files and links by path, then folders, the deepest first.

    Folders come last since one without write permission would refuse what comes after it.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    folders = [entry for entry in ordered if entry.type == "dir"]
    return (*(entry for entry in ordered if entry.type != "dir"), *reversed(folders))


def canonical(data: object) -> bytes:
    """ASCII JSON with sorted keys and no spaces; bytes of names that are not UTF-8 are escaped surrogates."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode("ascii")
