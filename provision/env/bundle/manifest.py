"""What a bundle holds: the frozen nouns of the manifest, and their JSON and digest."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple

FORMAT = 3

PACKAGE_FILE = 64 << 20  # bytes of a JSON file that describes one package, of conda's or pip's

_MANY = 4096  # entries that become text at once

FOLDERS = "./"  # the "package" of the last chunk, which holds every folder and every hard link

EntryType = Literal["file", "link", "hard", "dir"]
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
    """A file, symlink, hard link or folder of the environment; ``path`` is relative to the prefix.

    ``chunks`` names one tar chunk, or the raw ranges of a large file in order (``raw``). An entry with marks is in no
    chunk: a file lies among the prefix files, a link is complete as it stands here. Only a file that is too large to be
    rewritten has both marks and ranges.

    A hard link is one more name of another file: ``target`` is that file's path, which comes before its own, and mode
    and mtime are that file's.
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
        if self.type in ("link", "hard"):
            data["target"] = self.target
        if self.chunks and chunk:
            data["chunk"] = list(self.chunks) if self.raw else self.chunks[0]
        if self.marks:
            data["prefix"] = [[m.kind, m.target, *([m.room] if m.room else [])] for m in self.marks]
        return data

    def text(self, *, chunk: bool = True) -> str:
        """What ``canonical`` makes of ``to_json``: an environment has tens of thousands of entries."""
        if self.marks or self.raw:
            return canonical(self.to_json(chunk=chunk)).decode()
        place = f'"chunk":{self.chunks[0]},' if chunk and self.chunks else ""
        head = f'{{{place}"mode":{self.mode},"mtime":{self.mtime},"path":{_quoted(self.path)},'
        if self.type == "file":
            return f'{head}"sha256":"{self.sha256}","size":{self.size},"type":"file"}}'
        target = "" if self.type == "dir" else f'"target":{_quoted(self.target)},'
        return f'{head}{target}"type":"{self.type}"}}'


@dataclass(frozen=True, slots=True)
class Chunk:
    """One compressed member of the bundle.

    Attributes:
        digest: sha256 of the compressed bytes, so that a relay without zstd can verify them.
        key: equal for equal paths, modes and contents, whatever the times: see ``bundle.keys``.
        kind: ``tar``, a stream of whole members without closing blocks, or ``raw``, a range of one file.
        package: the package it belongs to, or a folder (with a slash at its end) of files that no package owns.
        size: bytes uncompressed.
        compressed: bytes in the bundle.
        offset: where they begin in the bundle.
    """

    digest: str
    key: str
    kind: Literal["tar", "raw"]
    package: str
    size: int
    compressed: int
    offset: int

    @property
    def member(self) -> str:
        """The chunk's name in the bundle."""
        if self.package == FOLDERS:
            return "folders.tar.zst"
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
        digest = hashlib.sha256()
        tree = {"platform": [canonical(self.platform)], "source_prefix": [canonical(self.source_prefix)]}
        for piece in _object(tree | {"files": self._files(chunk=False)}):
            digest.update(piece)
        return digest.hexdigest()

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

    @property
    def records(self) -> tuple[str, ...]:
        """The paths of the files that list hashes of others: RECORD and conda-meta."""
        return tuple(entry.path for entry in self.marked if any(mark.kind == "record" for mark in entry.marks))

    @property
    def rewritable(self) -> tuple[Entry, ...]:
        """The files that lie in the member ``prefix-files.tar.zst``."""
        return tuple(entry for entry in self.marked if entry.type == "file" and not entry.raw)

    def to_json(self) -> bytes:
        """The member ``manifest.json``: ASCII, sorted keys."""
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "files"} | {
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "packages": [package.to_json() for package in self.packages],
            "prefix_files": self.prefix_files.to_json(),
        }
        texts: dict[str, Iterable[bytes]] = {key: [canonical(value)] for key, value in data.items()}
        return b"".join(_object(texts | {"files": self._files(chunk=True)}))

    def _files(self, *, chunk: bool) -> Iterator[bytes]:
        """The text of ``files``, in pieces: there may be many."""
        yield b"["
        for begin in range(0, len(self.files), _MANY):
            rows = [entry.text(chunk=chunk) for entry in self.files[begin : begin + _MANY]]
            yield (("," if begin else "") + ",".join(rows)).encode("ascii")
        yield b"]"


def stream_order(entries: list[Entry]) -> tuple[Entry, ...]:
    """Sort the members of a tar stream: files and links of both kinds by path, then folders, the deepest first.

    Folders come last since one without write permission would refuse what comes after it.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    folders = [entry for entry in ordered if entry.type == "dir"]
    return (*(entry for entry in ordered if entry.type != "dir"), *reversed(folders))


def _object(texts: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """The canonical JSON object whose values have these texts, in pieces."""
    for number, key in enumerate(sorted(texts)):
        yield b"%b%b:" % (b"," if number else b"{", canonical(key))
        yield from texts[key]
    yield b"}"


def canonical(data: object) -> bytes:
    """ASCII JSON with sorted keys and no spaces; bytes of names that are not UTF-8 are escaped surrogates."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode("ascii")
