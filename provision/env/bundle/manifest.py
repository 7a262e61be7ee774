"""The manifest of a bundle: its files, chunks and packages, their JSON, the environment's digest and the chunks' keys.

Keys of chunks are equal for two environments that were built at different times from the same packages. A chunk's
digest also depends on the mtimes of its files, which are new after a reinstall, and on the compressor. Its key does
not: it is the sha256 of one record for each member in the order of the stream. A record has four fields, each followed
by a NUL:

- the path;
- ``file``, ``link``, ``hard`` or ``dir``;
- the mode in octal;
- a file's sha256 in hexadecimal (see ``content_digest``), a link's target, nothing for a folder.

The key of a raw range is that of one record: path, ``raw``, mode, and ``OFFSET:SHA256`` with the sha256 of the file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any, Literal, NamedTuple

FORMAT = 3

PACKAGE_FILE = 64 << 20  # bytes of a JSON file of conda or pip that describes one package

_MANY = 4096  # entries that are encoded at once

FOLDERS = "./"  # the "package" of the last chunk, which has all folders and hard links

EntryType = Literal["file", "link", "hard", "dir"]
MarkKind = Literal["shebang", "text", "binary", "link", "record"]
PackageKind = Literal["conda", "pypi", "editable"]


class Mark(NamedTuple):
    """How a file contains a source path.

    Attributes:
        kind: ``shebang`` (its interpreter), ``text``, ``binary``, ``link`` (a symlink's target), or ``record``:
            a list of hashes (RECORD, conda-meta) that is updated when the files in it are rewritten.
        target: the path of the relocation, relative to the prefix; empty for the prefix itself.
        room: bytes that conda reserved for the prefix in a binary (the length of its placeholder); else 0.
    """

    kind: MarkKind
    target: str = ""
    room: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, symlink, hard link or folder of the environment; ``path`` is relative to the prefix.

    ``chunks`` has the number of one tar chunk, or the numbers of the raw ranges of a large file in order (``raw``). An
    entry with marks is in no chunk: a file is in the member of prefix files, and a link is complete here. Only a file
    that is too large to be rewritten has marks and ranges.

    A hard link is another name of a file: ``target`` is that file's path, which sorts before its own. Mode and mtime
    are that file's.
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
        """The entry in the manifest; without its chunk numbers if ``chunk`` is false."""
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
        """``canonical(to_json())``, but faster: an environment has tens of thousands of entries."""
        if self.marks or self.raw:
            return canonical(self.to_json(chunk=chunk)).decode()
        number = f'"chunk":{self.chunks[0]},' if chunk and self.chunks else ""
        head = f'{{{number}"mode":{self.mode},"mtime":{self.mtime},"path":{_quoted(self.path)},'
        if self.type == "file":
            return f'{head}"sha256":"{self.sha256}","size":{self.size},"type":"file"}}'
        target = "" if self.type == "dir" else f'"target":{_quoted(self.target)},'
        return f'{head}{target}"type":"{self.type}"}}'


@dataclass(frozen=True, slots=True)
class Chunk:
    """One compressed member of the bundle.

    Attributes:
        digest: sha256 of the compressed bytes: a relay without zstd can verify them.
        key: equal for equal paths, modes and contents, regardless of mtimes: see the module.
        kind: ``tar``, a stream of whole members without closing blocks, or ``raw``, a range of one file.
        package: its package, or a folder (ending in a slash) of files without a package.
        size: bytes uncompressed.
        compressed: bytes in the bundle.
        offset: of the compressed bytes in the bundle.
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
        """The chunk in the manifest."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class PrefixFiles:
    """The member ``prefix-files.tar.zst``; fields as in ``Chunk``."""

    digest: str
    size: int
    compressed: int
    offset: int

    member = "prefix-files.tar.zst"

    def to_json(self) -> dict[str, Any]:
        """The member in the manifest."""
        return dict(vars(self))


@dataclass(frozen=True)
class Package:
    """A distribution in the environment."""

    name: str
    version: str
    kind: PackageKind

    def to_json(self) -> dict[str, Any]:
        """The package in the manifest."""
        return dict(vars(self))


@dataclass(frozen=True)
class Manifest:
    """Everything known about a bundle. ``files`` are sorted by path. The last of ``relocations`` is the prefix."""

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
        """The identity of the environment: equal for equal trees, however they are divided into chunks."""
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
        """All compressed members, in the order of the bundle."""
        return (*self.chunks, self.prefix_files)

    @property
    def marked(self) -> tuple[Entry, ...]:
        """The entries that depend on the prefix."""
        return tuple(entry for entry in self.files if entry.marks)

    @property
    def records(self) -> tuple[str, ...]:
        """The paths of RECORD and conda-meta files, which list hashes of other files."""
        return tuple(entry.path for entry in self.marked if any(mark.kind == "record" for mark in entry.marks))

    @property
    def rewritable(self) -> tuple[Entry, ...]:
        """The files in the member ``prefix-files.tar.zst``."""
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
        """The JSON of ``files``, in pieces: there may be many."""
        yield b"["
        for begin in range(0, len(self.files), _MANY):
            rows = [entry.text(chunk=chunk) for entry in self.files[begin : begin + _MANY]]
            yield (("," if begin else "") + ",".join(rows)).encode("ascii")
        yield b"]"


def stream_order(entries: list[Entry]) -> tuple[Entry, ...]:
    """Sort the members of a tar stream: files and links of both kinds by path, then folders, the deepest first.

    Folders come last: tar cannot create files in a folder without write permission.
    """
    ordered = sorted(entries, key=lambda entry: entry.path)
    folders = [entry for entry in ordered if entry.type == "dir"]
    return (*(entry for entry in ordered if entry.type != "dir"), *reversed(folders))


def _object(texts: Mapping[str, Iterable[bytes]]) -> Iterator[bytes]:
    """The canonical JSON object with these values, in pieces."""
    for number, key in enumerate(sorted(texts)):
        yield b"%b%b:" % (b"," if number else b"{", canonical(key))
        yield from texts[key]
    yield b"}"


def canonical(data: object) -> bytes:
    """ASCII JSON with sorted keys and no spaces; bytes of names that are not UTF-8 are escaped surrogates."""
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode("ascii")


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause Python's garbage collector while very many objects are created that all stay in use.

    It would examine all of them again and again, which takes a tenth of the time and frees nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_NO_FLAGS = bytes(4)


def content_digest(path: str, data: bytes | memoryview) -> str:
    """The sha256 of a file for a key: that of a .pyc file does not depend on the mtime of its source.

    The header of a .pyc file (PEP 552) has four bytes of magic, four of flags, and with no flag set four of its
    source's mtime and four of its source's size.
    """
    if not has_source_time(path, data):
        return hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(bytes(data[:8]) + bytes(4))
    digest.update(memoryview(data)[12:])
    return digest.hexdigest()


def has_source_time(path: str, data: bytes | memoryview) -> bool:
    """Whether a file contains the mtime of its source."""
    return path.endswith(".pyc") and len(data) >= 16 and data[4:8] == _NO_FLAGS


def key_record(path: bytes, kind: str, mode: int, content: bytes) -> bytes:
    """The record of one member."""
    return b"%b\0%b\0%o\0%b\0" % (path, kind.encode(), mode, content)


def key_of_records(records: Iterable[bytes]) -> str:
    """The key of a chunk from the records of its members."""
    return hashlib.sha256(b"".join(records)).hexdigest()


def key_of_members(members: Iterable[tuple[Entry, str]]) -> str:
    """The key of a tar chunk from its members, in the order of the stream, and their ``content_digest``."""
    return key_of_records(
        key_record(os.fsencode(entry.path), entry.type, entry.mode, os.fsencode(entry.target or digest))
        for entry, digest in members
    )


def key_of_range(path: str, mode: int, offset: int, sha256: str) -> str:
    """The key of the range at ``offset`` of a large file with this sha256."""
    return key_of_records([key_record(os.fsencode(path), "raw", mode, f"{offset}:{sha256}".encode())])
