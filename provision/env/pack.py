"""Pack an environment into a bundle, in one pass over its files."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import datetime, timezone
from pathlib import Path

import provision
from provision.env import chunks, facts, reading, tar, writer
from provision.env.frames import Frame, FrameMaker
from provision.env.manifest import Chunk, Entry, Manifest, PrefixFiles
from provision.env.marks import Seeking
from provision.env.prefixes import Search
from provision.env.scan import Found
from provision.env.seal import Sealed, Traits, entry_of
from provision.env.survey import Survey, survey
from provision.env.workers import Workers, processors
from provision.errors import UsageError
from provision.model import Emit, Notice, Progress, StageFinished, StageStarted

STAGE = "pack"

_WORTH_A_WORKER = 16 << 20  # bytes of files; for fewer, starting one more process takes longer than it saves
_BLOCK = 4 << 20  # bytes of a large file read at once


def pack(prefix: Path, out: Path, *, name: str, emit: Emit, limit: int = chunks.LIMIT) -> Manifest:
    """Pack the environment at ``prefix`` into the bundle ``out``.

    Args:
        prefix: the environment; see ``source.find_env``.
        out: the bundle; it appears under this name only when it is whole.
        name: what the environment is called.
        emit: told how many bytes of files have been packed.
        limit: bytes of a chunk; only tests have reason to change it.

    Returns:
        The manifest that was written.

    Raises:
        UsageError: a file cannot be read, or ``out`` cannot be written.
        BundleError: the environment changed while it was packed.
    """
    started = time.monotonic()
    if out.resolve().is_relative_to(prefix.resolve()):
        raise UsageError(f"{out} would lie inside the environment", hint="write the bundle elsewhere with --output")
    found = survey(prefix)
    for text in found.notices:
        emit(Notice(text, "warning"))
    emit(StageStarted(STAGE, f"Packing {name}", found.size, "bytes"))
    with writer.create(out) as bundle:
        packing = _Packing(found, bundle, emit, limit)
        packing.run()
        manifest = packing.manifest(name)
        bundle.finish(manifest)
    emit(StageFinished(STAGE, time.monotonic() - started))
    return manifest


class _Packing:
    """One pass: what has been written, and what is known of it."""

    def __init__(self, found: Survey, bundle: writer.Writer, emit: Emit, limit: int) -> None:
        self._survey = found
        self._bundle = bundle
        self._emit = emit
        self._limit = limit
        self._seeking = Seeking(Search(found.relocations), found.owners.rooms, found.programs)
        self._chunks: list[Chunk] = []
        self._entries: list[Entry] = []
        self._marked: list[tuple[Entry, bytes]] = []
        self._traits = Traits()
        self._done = 0

    def run(self) -> None:
        """Write every chunk: large files one by one with zstd's own threads, then the rest part by part in ours."""
        parts = chunks.plan(self._survey.found, self._survey.owners.owner, limit=self._limit)
        small = [part for part in parts if not part.raw]
        number = min(processors(), 1 + sum(part.size for part in small) // _WORTH_A_WORKER)
        with Workers(self._seeking, number) as workers:
            results = workers.seal(small)
            for part in parts:
                if part.raw:
                    self._large(part.found[0], part.package)
            for part, sealed in results:
                self._keep(part, sealed)
                self._advance(part.size)

    def manifest(self, name: str) -> Manifest:
        """Write the prefix files, and describe everything."""
        found, packages = self._survey, self._survey.owners.packages
        entries = sorted((*self._entries, *(entry for entry, _ in self._marked)), key=lambda entry: entry.path)
        versions = facts.versions(Path(found.prefix), packages, found.sites)
        architectures = tuple(sorted(self._traits.architectures)) if versions["cuda"] else ()
        glibc = self._traits.glibc
        return Manifest(
            name=name,
            tool=provision.__version__,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            platform=facts.platform(Path(found.prefix)),
            python=facts.python(packages, (entry.path for entry in entries)),
            source_prefix=found.prefix,
            chunks=tuple(self._chunks),
            prefix_files=self._write_prefix_files(),
            files=tuple(entries),
            relocations=found.relocations,
            packages=packages,
            glibc=f"{glibc[0]}.{glibc[1]}" if glibc else None,
            versions=versions,
            gpu_architectures=architectures or None,
            notices=(*found.notices, *facts.notices(versions, architectures)),
        )

    def _keep(self, part: chunks.Part, sealed: Sealed) -> None:
        index = (self._write(sealed.frame, part.package),) if sealed.frame else ()
        for number, (found, digest) in enumerate(zip(part.found, sealed.digests, strict=True)):
            if number in sealed.marked:
                marks, data = sealed.marked[number]
                self._marked.append((entry_of(found, digest, marks=marks), data))
            else:
                self._entries.append(entry_of(found, digest, chunks=index))
        self._traits.merge(sealed.traits)

    def _large(self, found: Found, package: str) -> None:
        """Write a large file as raw ranges, unless it turns out to hold the prefix."""
        start, first = self._bundle.offset, len(self._chunks)
        search = self._seeking.search
        whole = hashlib.sha256()
        maybe = False
        tail = b""
        with reading.opened(found) as descriptor:
            for begin in range(0, found.size, self._limit):
                maker = FrameMaker("raw", threads=processors())
                end = min(begin + self._limit, found.size)
                for offset in range(begin, end, _BLOCK):
                    block = reading.read_at(descriptor, offset, min(_BLOCK, end - offset), found)
                    whole.update(block)
                    maker.add(block)
                    window = tail + block
                    maybe = maybe or search.maybe(window)
                    self._traits.learn_architectures(found, window)
                    tail = window[-search.overlap :]
                    self._advance(len(block))
                self._write(maker.finish(), package)
            self._traits.learn_glibc(lambda offset, size: os.pread(descriptor, size, offset))
            if maybe:
                data = reading.read_at(descriptor, 0, found.size, found)
                if marks := self._seeking.marks(found, data):
                    self._bundle.rewind(start)
                    del self._chunks[first:]
                    self._marked.append((entry_of(found, whole.hexdigest(), marks=marks), data))
                    return
        ranges = tuple(range(first, len(self._chunks)))
        self._entries.append(entry_of(found, whole.hexdigest(), chunks=ranges))

    def _write(self, frame: Frame, package: str) -> int:
        """Write a chunk; its index."""
        offset = self._bundle.next_data
        chunk = Chunk(frame.digest, frame.kind, package, frame.size, frame.compressed, offset, frame.sha256)
        self._bundle.add_chunk(chunk, frame.blocks)
        self._chunks.append(chunk)
        return len(self._chunks) - 1

    def _write_prefix_files(self) -> PrefixFiles:
        maker = FrameMaker("tar")
        for entry, data in sorted(self._marked, key=lambda pair: pair[0].path):
            if entry.type == "file":
                maker.add(tar.entry_header(entry), data, bytes(tar.padding(len(data))))
        frame = maker.finish()
        offset = self._bundle.next_data
        self._bundle.add_prefix_files(frame.blocks)
        return PrefixFiles(frame.digest, frame.size, frame.compressed, offset, frame.sha256)

    def _advance(self, size: int) -> None:
        self._done += size
        self._emit(Progress(STAGE, self._done, self._survey.size))
