"""A bundle becomes an archive that plain conda-pack users can open.

    tar xf NAME.tar.gz -C FOLDER; FOLDER/bin/conda-unpack; source FOLDER/bin/activate

One pass from the bundle: chunks are copied as they lie in it where the archive is a ``.tar.zst``, since zstd frames
and our tar streams may stand one after the other. ``activate`` and ``deactivate`` are conda-pack's own scripts,
``conda-unpack`` is ours (``conda_unpack.py`` says why), with the table that conda-pack's has.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import provision
from provision.env.bundle import tar
from provision.env.bundle.manifest import FOLDERS, Entry, Manifest
from provision.env.bundle.members import Stream
from provision.env.bundle.reader import Bundle
from provision.env.interchange import compress
from provision.env.interchange.prepare import MARK, Prepared, prepare
from provision.env.packing import temporary
from provision.errors import UsageError
from provision.model import Emit, Notice, Progress, StageFinished, StageStarted

STAGE = "export"
SUFFIXES = {".tar.gz": "gz", ".tgz": "gz", ".tar.zst": "zst", ".tzst": "zst", ".tar": "tar"}

_SCRIPTS = ("activate", "activate.fish", "deactivate")  # conda-pack's, in its folder scripts/posix
_TIME = 315532800  # 1980-01-01, like all that is no file of the environment

# sh runs the first line, Python reads it as a string: the program finds the Python beside it, activated or not.
_HEAD = "#!/bin/sh\n'''exec' \"$(dirname -- \"$0\")/python\" \"$0\" \"$@\"\n' '''\n"


@dataclass(frozen=True)
class Exported:
    """An archive.

    Attributes:
        path: the archive.
        size: its bytes.
        members: how many files, links and folders it holds.
        records: how many files conda-unpack will rewrite.
        notices: what will not work after conda-unpack.
    """

    path: Path
    size: int
    members: int
    records: int
    notices: tuple[str, ...]


def compression(out: Path) -> Literal["gz", "zst", "tar"]:
    """How an archive of this name is compressed.

    Raises:
        UsageError: the name tells of no format that is written.
    """
    for suffix, kind in SUFFIXES.items():
        if out.name.endswith(suffix):
            return kind  # type: ignore[return-value] # the table holds nothing else
    stem = out.name.partition(".")[0]
    raise UsageError(f"{out}: its name must end in {', '.join(SUFFIXES)}", hint=f"--output {stem}.tar.gz")


def export(bundle: Bundle, out: Path, *, emit: Emit) -> Exported:
    """Write the archive ``out``; its name says how it is compressed.

    Raises:
        UsageError: ``out`` cannot be written, or its name tells of no format.
        BundleError: the bundle is damaged.
    """
    started = time.monotonic()
    kind = compression(out)
    archive = _Archive(bundle, prepare(bundle.manifest, bundle.prefix_files()))
    for text in archive.prepared.notices:
        emit(Notice(text, "warning"))
    total = archive.size
    emit(StageStarted(STAGE, f"Writing {out}", total, "bytes"))
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        emit(Progress(STAGE, done, total))

    threads = len(os.sched_getaffinity(0))
    with temporary.created(out) as file:
        if kind == "zst":
            file.writelines(archive.frames(advance, threads))
        elif kind == "gz":
            file.writelines(compress.gzipped(archive.plain(advance), threads=threads))
        else:
            file.writelines(archive.plain(advance))
    emit(StageFinished(STAGE, time.monotonic() - started))
    names = {path for path, _, _ in archive.prepared.records} | {path for path, _ in archive.prepared.scripts}
    return Exported(out, out.stat().st_size, archive.members, len(names), archive.prepared.notices)


class _Archive:
    """The tar stream of an archive, in parts: a chunk that goes as it is, or bytes."""

    def __init__(self, bundle: Bundle, prepared: Prepared) -> None:
        self.prepared = prepared
        self._bundle = bundle
        self._manifest = bundle.manifest
        scripts = _scripts(bundle.manifest, prepared)
        self._own = tuple((_own_entry(path, data), data) for path, data in scripts.items())
        self._dropped = prepared.dropped | scripts.keys()

    @property
    def members(self) -> int:
        """How many files, links and folders the archive holds."""
        kept = [entry for entry in self._manifest.files if entry.chunks and entry.path not in self._dropped]
        return len(kept) + len(self._behind())

    @property
    def size(self) -> int:
        """The bytes of the tar stream."""
        kept = (entry for entry in self._manifest.files if entry.chunks and entry.path not in self._dropped)
        return sum(map(tar.span, kept)) + sum(tar.span(entry) for entry, _ in self._behind()) + len(tar.END)

    def plain(self, advance: Callable[[int], None]) -> Iterator[bytes]:
        """The tar stream; ``advance`` is told how many of its bytes were taken."""
        for part in self._parts():
            for block in self._bundle.chunk_blocks(part) if isinstance(part, int) else part:
                yield block
                advance(len(block))

    def frames(self, advance: Callable[[int], None], threads: int) -> Iterator[bytes]:
        """The tar stream as zstd frames; ``advance`` is told how many bytes of the stream they stand for."""
        for part in self._parts():
            if isinstance(part, int):
                yield from self._bundle.chunk_compressed(part)
                advance(self._manifest.chunks[part].size)
            else:
                yield from compress.framed(_told(part, advance), threads=threads)

    def _parts(self) -> Iterator[int | Iterator[bytes]]:
        """Tar chunks, large files, what differs from the bundle, then folders and hard links, which need the rest."""
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
            for entry, data in self._behind()
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
        """A chunk without what is dropped; read to its end, where it is verified."""
        stream = Stream(self._bundle.chunk_blocks(index))
        for entry in members:
            for piece in stream.pieces(tar.span(entry)):
                if entry.path not in self._dropped:
                    yield bytes(piece)
        stream.drain()

    def _behind(self) -> tuple[tuple[Entry, bytes], ...]:
        scripts = {entry.path for entry, _ in self._own}
        return (*(one for one in self.prepared.files if one[0].path not in scripts), *self._own)


def _told(blocks: Iterable[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for block in blocks:
        yield block
        advance(len(block))


def _scripts(manifest: Manifest, prepared: Prepared) -> dict[str, bytes]:
    """What conda-pack adds to an environment, by path."""
    folder = importlib.resources.files("conda_pack") / "scripts" / "posix"
    scripts = {f"bin/{name}": (folder / name).read_bytes() for name in _SCRIPTS}
    return scripts | {"bin/conda-unpack": conda_unpack(manifest, prepared)}


def conda_unpack(manifest: Manifest, prepared: Prepared) -> bytes:
    """The program ``bin/conda-unpack``: ``conda_unpack.py`` with its tables filled in."""
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
