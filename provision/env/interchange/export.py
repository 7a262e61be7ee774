"""Export a bundle as an archive for users of conda-pack.

    tar xf NAME.tar.gz -C FOLDER; FOLDER/bin/conda-unpack; source FOLDER/bin/activate

The bundle is read once. A ``.tar.zst`` contains the bundle's compressed chunks unchanged, since zstd frames and tar
streams can be concatenated. ``activate`` and ``deactivate`` are conda-pack's own scripts; ``conda-unpack`` is
clusterctl's (``conda_unpack.py`` says why), with the same table as conda-pack's.

In text the prefix becomes a placeholder that occurs nowhere else. Python scripts ask ``/usr/bin/env`` for their
interpreter, as in conda-pack, until ``bin/conda-unpack`` writes its path. Symlinks into the environment become relative
and need no rewriting.

gzip compresses pieces in parallel into one member, like pigz; each piece uses the end of the previous one as its
dictionary (RFC 1951, 1952).
"""

from __future__ import annotations

import importlib.resources
import os
import posixpath
import re
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import zstandard

import provision
from provision.env import relocation
from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS, Entry, Manifest
from provision.env.bundle.reader import Bundle, Stream
from provision.env.packing import temporary
from provision.env.relocation import Search, plain, stale_bytecode, update_size
from provision.errors import UsageError
from provision.model import Emit, Notice
from provision.stages import stage

SUFFIXES = {".tar.gz": "gz", ".tgz": "gz", ".tar.zst": "zst", ".tzst": "zst", ".tar": "tar"}

_SCRIPTS = ("activate", "activate.fish", "deactivate")  # conda-pack's, in its folder scripts/posix
_TIME = 315532800  # 1980-01-01, for files that are not the environment's

# sh runs these lines, Python reads them as a string: the program runs with the Python in its folder.
_HEAD = "#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"

GZIP_LEVEL = 4  # conda-pack's own default
ZSTD_LEVEL = 3

_PIECE = 1 << 20  # bytes that one thread compresses at once
_WINDOW = 32 << 10  # bytes of deflate's dictionary
_HEADER = b"\x1f\x8b\x08\x00\0\0\0\0\x00\x03"  # deflate, no name, no time, Unix


@dataclass(frozen=True)
class Exported:
    """An archive.

    Attributes:
        path: the archive.
        size: its bytes.
        members: the number of files, links and folders.
        records: the number of files that conda-unpack will rewrite.
        notices: what will not work after conda-unpack.
    """

    path: Path
    size: int
    members: int
    records: int
    notices: tuple[str, ...]


def compression(out: Path) -> Literal["gz", "zst", "tar"]:
    """The compression of an archive with this name.

    Raises:
        UsageError: the suffix is unknown.
    """
    for suffix, kind in SUFFIXES.items():
        if out.name.endswith(suffix):
            return kind  # type: ignore[return-value] # the table has no other values
    stem = out.name.partition(".")[0]
    raise UsageError(f"{out}: its name must end in {', '.join(SUFFIXES)}", hint=f"--output {stem}.tar.gz")


def export(bundle: Bundle, out: Path, *, emit: Emit) -> Exported:
    """Write the archive ``out``; its suffix decides the compression.

    Raises:
        UsageError: ``out`` cannot be written, or its suffix is unknown.
        BundleError: the bundle is damaged.
    """
    kind = compression(out)
    archive = _Archive(bundle, prepare(bundle.manifest, bundle.prefix_files()))
    for text in archive.prepared.notices:
        emit(Notice(text, "warning"))
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        shown.progress(done)

    threads = len(os.sched_getaffinity(0))
    with (
        stage(emit, "export", f"Writing {out}", archive.size, "bytes") as shown,
        temporary.create_file(out) as file,
    ):
        if kind == "zst":
            file.writelines(archive.frames(advance, threads))
        elif kind == "gz":
            file.writelines(gzip_stream(archive.plain(advance), threads=threads))
        else:
            file.writelines(archive.plain(advance))

    names = {path for path, _, _ in archive.prepared.records} | {path for path, _ in archive.prepared.scripts}
    return Exported(out, out.stat().st_size, archive.members, len(names), archive.prepared.notices)


class _Archive:
    """The tar stream of an archive, in parts: the number of an unchanged chunk, or bytes."""

    def __init__(self, bundle: Bundle, prepared: Preparation) -> None:
        self.prepared = prepared
        self._bundle = bundle
        self._manifest = bundle.manifest
        scripts = _scripts(bundle.manifest, prepared)
        self._own = tuple((_own_entry(path, data), data) for path, data in scripts.items())
        self._dropped = prepared.dropped | scripts.keys()

    @property
    def members(self) -> int:
        """The number of files, links and folders in the archive."""
        return len(self._entries)

    @property
    def size(self) -> int:
        """The bytes of the tar stream."""
        return sum(map(tar.span, self._entries)) + len(tar.END)

    @cached_property
    def _entries(self) -> list[Entry]:
        unchanged = (entry for entry in self._manifest.files if entry.chunks and entry.path not in self._dropped)
        return [*unchanged, *(entry for entry, _ in self._added())]

    def plain(self, advance: Callable[[int], None]) -> Iterator[bytes]:
        """The tar stream; ``advance`` receives the size of every block."""
        for part in self._parts():
            for block in self._bundle.chunk_blocks(part) if isinstance(part, int) else part:
                yield block
                advance(len(block))

    def frames(self, advance: Callable[[int], None], threads: int) -> Iterator[bytes]:
        """The tar stream as zstd frames; ``advance`` receives uncompressed sizes."""
        for part in self._parts():
            if isinstance(part, int):
                yield from self._bundle.chunk_compressed(part)
                advance(self._manifest.chunks[part].size)
            else:
                yield from zstd_stream(_report_blocks(part, advance), threads=threads)

    def _parts(self) -> Iterator[int | Iterator[bytes]]:
        """Tar chunks, large files, changed files, then folders and hard links, which need the others."""
        tars = [index for index, chunk in enumerate(self._manifest.chunks) if chunk.kind == "tar"]
        last = [index for index in tars if self._manifest.chunks[index].package == FOLDERS]
        for index in tars:
            if index not in last:
                yield self._chunk(index)
        for entry in self._manifest.files:
            if entry.raw:
                yield iter([tar.entry_header(entry)])
                yield from entry.chunks
                yield iter([bytes(tar.padding(entry.size))])
        yield (
            piece
            for entry, data in self._added()
            for piece in (tar.entry_header(entry), data, bytes(tar.padding(entry.size)))
        )
        for index in last:
            yield self._chunk(index)
        yield iter([tar.END])

    def _chunk(self, index: int) -> int | Iterator[bytes]:
        members = self._manifest.members(index)
        if self._dropped.isdisjoint(entry.path for entry in members):
            return index
        return self._without(index, members)

    def _without(self, index: int, members: Iterable[Entry]) -> Iterator[bytes]:
        """A chunk without dropped members; it is read to its end, where its digest is checked."""
        stream = Stream(self._bundle.chunk_blocks(index))
        for entry in members:
            for piece in stream.pieces(tar.span(entry)):
                if entry.path not in self._dropped:
                    yield bytes(piece)
        stream.drain()

    def _added(self) -> tuple[tuple[Entry, bytes], ...]:
        scripts = {entry.path for entry, _ in self._own}
        return (*(one for one in self.prepared.files if one[0].path not in scripts), *self._own)


def _report_blocks(blocks: Iterable[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for block in blocks:
        yield block
        advance(len(block))


def _scripts(manifest: Manifest, prepared: Preparation) -> dict[str, bytes]:
    """The scripts that conda-pack adds to an environment, by path."""
    folder = importlib.resources.files("conda_pack") / "scripts" / "posix"
    scripts = {f"bin/{name}": (folder / name).read_bytes() for name in _SCRIPTS}
    return scripts | {"bin/conda-unpack": conda_unpack(manifest, prepared)}


def conda_unpack(manifest: Manifest, prepared: Preparation) -> bytes:
    """The program ``bin/conda-unpack``: ``conda_unpack.py`` with its tables."""
    source = (importlib.resources.files(__package__) / "conda_unpack.py").read_text(encoding="utf-8")
    program = _HEAD + source.split('"""', 2)[2].lstrip("\n")
    tables = {
        "_prefix_records": _table(prepared.records),
        "_script_records": _table(prepared.scripts),
        "_hash_records": _table(prepared.hash_lists),
        "_spare_records": _table(prepared.spare),
        "_source_prefix": ascii(manifest.source_prefix),
        "_placeholder": ascii(MARK),
        "_version": ascii(provision.__version__),
    }
    return re.sub(
        rf"^({'|'.join(tables)})\b.*$", lambda line: f"{line[1]} = {tables[line[1]]}", program, flags=re.MULTILINE
    ).encode()


def _table(rows: Iterable[object]) -> str:
    return "[\n" + "".join(f"{row!a},\n" for row in rows) + "]"


def _own_entry(path: str, data: bytes) -> Entry:
    mode = 0o755 if path.endswith("conda-unpack") else 0o644
    return Entry(path, "file", mode, _TIME, len(data))


def gzip_stream(blocks: Iterable[bytes], *, threads: int) -> Iterator[bytes]:
    """Compress blocks to a gzip file."""
    checksum, size = 0, 0
    window = b""

    def jobs() -> Iterator[Callable[[], bytes]]:
        nonlocal checksum, size, window
        for piece in split_pieces(blocks, _PIECE):
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
            yield _Deflate(piece, window)
            window = piece[-_WINDOW:]

    yield _HEADER
    yield from _run_parallel(jobs(), threads)
    yield zlib.compressobj(wbits=-zlib.MAX_WBITS).flush()
    yield struct.pack("<II", checksum, size & 0xFFFFFFFF)


def zstd_stream(blocks: Iterable[bytes], *, threads: int) -> Iterator[bytes]:
    """Compress blocks to a zstd frame; without blocks there is no frame."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, threads=threads).compressobj()
    empty = True
    for block in blocks:
        empty = False
        if data := compressor.compress(block):
            yield data
    if not empty:
        yield compressor.flush()


def split_pieces(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of ``size`` bytes; the last one may be shorter."""
    held: list[bytes] = []
    length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        if length < size:
            continue
        whole = b"".join(held)
        cut = length - length % size
        yield from (whole[start : start + size] for start in range(0, cut, size))
        held, length = [whole[cut:]], length - cut
    if length:
        yield b"".join(held)


class _Deflate:
    """Compresses one piece, up to a byte boundary where the next piece can start."""

    def __init__(self, piece: bytes, window: bytes) -> None:
        self._piece, self._window = piece, window

    def __call__(self) -> bytes:
        options = (GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY)
        compressor = zlib.compressobj(*options, self._window) if self._window else zlib.compressobj(*options)
        return compressor.compress(self._piece) + compressor.flush(zlib.Z_SYNC_FLUSH)


def _run_parallel(jobs: Iterator[Callable[[], bytes]], threads: int) -> Iterator[bytes]:
    """The results in order, with a limited number of jobs at once to limit memory."""
    waiting: deque[Future[bytes]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


MARK = "/opt/clusterctl_"
PLACEHOLDER = (MARK + "placehold_" * 24)[:255]  # as long as conda-build's, so every package has room for it

_SHORTEST = 40  # bytes; a shorter placeholder might occur by chance
_LONG = "/" + "x" * 4096  # a prefix that fits into no binary


@dataclass(frozen=True)
class Preparation:
    """How the archive differs from the bundle.

    Attributes:
        files: entries and their bytes (none for a link), sorted by path.
        dropped: paths in chunks that are not in the archive, or are in ``files`` instead.
        records: conda-unpack's table: path, placeholder, ``text`` or ``binary``.
        scripts: scripts that ask ``/usr/bin/env`` for a program of ``bin``: path and program.
        hash_lists: RECORD files, then conda-meta files.
        spare: binaries that also work with the source prefix.
        notices: what will not work after conda-unpack.
    """

    files: tuple[tuple[Entry, bytes], ...]
    dropped: frozenset[str]
    records: tuple[tuple[str, str, str], ...]
    scripts: tuple[tuple[str, str], ...]
    hash_lists: tuple[str, ...]
    spare: tuple[str, ...]
    notices: tuple[str, ...]


@dataclass
class _Changes:
    """Prepared files and the tables of conda-unpack."""

    files: dict[str, tuple[Entry, bytes]] = field(default_factory=dict)
    records: list[tuple[str, str, str]] = field(default_factory=list)
    scripts: list[tuple[str, str]] = field(default_factory=list)
    spare: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def prepare(manifest: Manifest, prefix_files: Mapping[str, bytes]) -> Preparation:
    """Prepare the files that depend on the prefix, from their packed bytes.

    Args:
        manifest: of the bundle.
        prefix_files: ``Bundle.prefix_files()``.
    """
    search = Search(manifest.relocations)
    programs = frozenset(os.fsencode(entry.path[4:]) for entry in manifest.files if entry.path.startswith("bin/"))
    found = _Changes()
    for entry in manifest.marked:
        if entry.type == "link":
            found.files[entry.path] = replace(entry, target=_relative(entry, search)), b""
            continue
        if entry.raw:
            found.notices.append(f"{entry.path} is too large to be rewritten, and contains {manifest.source_prefix}")
            continue
        data = prefix_files[entry.path]
        kinds = {mark.kind for mark in entry.marks}
        if "binary" in kinds:
            content = _binary(entry, data, search, found)
        else:
            script = _script(entry.path, data, search, programs, found) if "shebang" in kinds else None
            content = search.replace(data, _at(PLACEHOLDER, search)) if script is None else script
            if PLACEHOLDER.encode() in content:
                found.records.append((entry.path, PLACEHOLDER, "text"))
        found.files[entry.path] = update_size(entry, content)
    names = {path for path, _, _ in found.records} | {path for path, _ in found.scripts}
    copies = _copies(manifest, found, names)
    lists = _update_lists(manifest, found, names | copies)
    return Preparation(
        files=tuple(found.files[path] for path in sorted(found.files)),
        dropped=_stale(manifest, names | copies) | copies,
        records=tuple(sorted(found.records, key=lambda record: (record[2], record[0], -len(record[1])))),
        scripts=tuple(sorted(found.scripts)),
        hash_lists=lists,
        spare=tuple(sorted(found.spare)),
        notices=tuple(found.notices),
    )


def _at(prefix: str, search: Search) -> dict[str, str]:
    """The new path of each relocation's target."""
    return {target: posixpath.join(prefix, target).rstrip("/") for _, target in search.relocations}


def _relative(entry: Entry, search: Search) -> str:
    """The target of a link: relative if it is in the environment, else unchanged."""
    target = os.fsdecode(search.replace(os.fsencode(entry.target), _at(PLACEHOLDER, search)))
    if target != PLACEHOLDER and not target.startswith(PLACEHOLDER + "/"):
        return entry.target
    here = posixpath.dirname(f"{PLACEHOLDER}/{entry.path}")
    return posixpath.relpath(target, here)


def _script(path: str, data: bytes, search: Search, programs: frozenset[bytes], found: _Changes) -> bytes | None:
    """A script whose first line contains the prefix or one of its programs; None for other scripts."""
    new = _at(PLACEHOLDER, search)
    wanted = relocation.env_program(data)
    if wanted and wanted[0] in programs:
        found.scripts.append((path, os.fsdecode(wanted[0])))
        return data[: len(data) - len(wanted[2])] + search.replace(wanted[2], new)
    script = relocation.split_script(data, search)
    if script is None:
        return None
    program, options, body = (search.replace(part, new) for part in script)
    name = program.removeprefix(f"{PLACEHOLDER}/bin/".encode())
    if name in programs and not options:
        found.scripts.append((path, os.fsdecode(name)))
        return b"#!/usr/bin/env " + name + b"\n" + body
    return b"#!" + program + (b" " + options if options else b"") + b"\n" + body


def _binary(entry: Entry, data: bytes, search: Search, found: _Changes) -> bytes:
    """A binary with conda's room gets a placeholder that fills it; other binaries keep the source prefix for now."""
    room = max(mark.room for mark in entry.marks)
    if room >= _SHORTEST and all(not mark.target for mark in entry.marks):
        placeholder = PLACEHOLDER[:room]
        try:
            content, left = relocation.rewrite_binary(data, search, _at(placeholder, search), room=room)
        except relocation.CannotRewrite:
            left = "it lacks the room"
        if not left:
            found.records.append((entry.path, placeholder, "binary"))
            return content
    try:  # paths that the loader searches can be relative to the file's folder, and then need no rewriting
        data, left = relocation.rewrite_binary(data, search, _at(_LONG, search), path=entry.path)
    except relocation.CannotRewrite:
        left = ""
    if "archive" in left:
        found.notices.append(f"{entry.path}: {left}")
        return data
    found.spare += [entry.path] if left else []
    spelled = {match.group() for match, _ in search.occurrences(data)}
    found.records += [
        (entry.path, source, "binary")
        for source, target in search.relocations
        if not target and plain(source) in spelled
    ]
    if any(mark.target for mark in entry.marks):
        found.notices.append(f"{entry.path}: conda-unpack cannot rewrite the path of a checkout in a binary")
    return data


def _update_lists(manifest: Manifest, found: _Changes, names: set[str]) -> tuple[str, ...]:
    """Update the lists of hashes for the archive. Returns those that conda-unpack must update again, RECORD first."""
    packed = {entry.path: entry.sha256 for entry in manifest.marked}
    prepared = (entry for entry, _ in found.files.values() if entry.type == "file")
    changed = {entry.path: entry for entry in prepared if entry.path in names or entry.sha256 != packed[entry.path]}
    later = {path: replace(changed[path], sha256="0" * 64) for path in names}  # differs from now, whatever it becomes
    lists = []
    for path in sorted(manifest.records, key=lambda path: (path.startswith("conda-meta/"), path)):
        entry, data = found.files[path]
        if path not in names and relocation.update_hashes(path, data, later, PLACEHOLDER) == data:
            continue
        lists.append(path)
        found.files[path] = update_size(entry, relocation.update_hashes(path, data, changed, PLACEHOLDER))
        changed[path] = found.files[path][0]
        later[path] = replace(changed[path], sha256="0" * 64)
    return tuple(lists)


def _copies(manifest: Manifest, found: _Changes, names: set[str]) -> set[str]:
    """Hard links to files that conda-unpack replaces become separate files, which it replaces too."""
    copies = {entry.path: entry.target for entry in manifest.files if entry.type == "hard" and entry.target in names}
    for path, target in copies.items():
        entry, data = found.files[target]
        found.files[path] = replace(entry, path=path), data
        found.records += [(path, old, mode) for where, old, mode in found.records if where == target]
        found.scripts += [(path, program) for where, program in found.scripts if where == target]
        found.spare += [path] if target in found.spare else []
    return set(copies)


def _stale(manifest: Manifest, names: set[str]) -> frozenset[str]:
    """.pyc files of .py files that conda-unpack rewrites: Python might load the outdated .pyc files."""
    return stale_bytecode(manifest, names) - {entry.target for entry in manifest.files if entry.type == "hard"}
