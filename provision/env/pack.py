"""Pack an environment into a bundle, in one pass over its files."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import provision
from provision.env import chunks, facts, owners, reading, tar, writer
from provision.env.frames import Frame, FrameMaker
from provision.env.manifest import Chunk, Entry, Manifest, PrefixFiles
from provision.env.prefixes import Search
from provision.env.scan import Found
from provision.env.seal import Sealed, Seeking, Traits, entry_of, seal
from provision.env.survey import Survey, survey
from provision.errors import UsageError
from provision.model import Emit, Notice, Progress, StageFinished, StageStarted

STAGE = "pack"

_IN_FLIGHT = 192 << 20  # bytes of files being compressed, or compressed and not yet written
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
    emit(StageStarted(STAGE, f"Packing {prefix}", found.size, "bytes"))
    with writer.create(out) as bundle:
        packing = _Packing(found, bundle, emit, limit)
        packing.run()
        manifest = packing.manifest(name)
        bundle.finish(manifest)
    size = out.stat().st_size
    summary = f"{len(manifest.files)} files, {found.size / 1e9:.2f} GB -> {out} ({size / 1e9:.2f} GB)"
    emit(StageFinished(STAGE, time.monotonic() - started, summary=summary))
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
        for part in parts:
            if part.raw:
                self._large(part.found[0], part.package)
        for part, sealed in _in_order([part for part in parts if not part.raw], self._seeking):
            if sealed.frame:
                index = self._write(sealed.frame, part.package)
                self._entries += (replace(entry, chunks=(index,)) for entry in sealed.entries)
            self._marked += sealed.marked
            self._traits.merge(sealed.traits)
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

    def _large(self, found: Found, package: str) -> None:
        """Write a large file as raw ranges, unless it turns out to hold the prefix."""
        start, first = self._bundle.offset, len(self._chunks)
        search = self._seeking.search
        whole = hashlib.sha256()
        maybe = False
        tail = b""
        with reading.opened(found) as descriptor:
            for begin in range(0, found.size, self._limit):
                maker = FrameMaker("raw", threads=_processors())
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
                    self._marked.append((entry_of(found, data, marks), data))
                    return
        ranges = tuple(range(first, len(self._chunks)))
        entry = Entry(found.path, "file", found.mode, found.mtime, found.size, whole.hexdigest())
        self._entries.append(replace(entry, chunks=ranges, raw=True))

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
        return PrefixFiles(frame.size, frame.compressed, offset, frame.digest)

    def _advance(self, size: int) -> None:
        self._done += size
        self._emit(Progress(STAGE, self._done, self._survey.size))


def _in_order(parts: Sequence[chunks.Part], seeking: Seeking) -> Iterator[tuple[chunks.Part, Sealed]]:
    """Seal parts on all processors; yields them in their order, with a bound on what is in memory."""
    waiting: deque[tuple[chunks.Part, Future[Sealed]]] = deque()
    held = 0
    pool = ThreadPoolExecutor(_processors())
    try:
        for part in parts:
            while waiting and (waiting[0][1].done() or held + part.size > _IN_FLIGHT):
                held -= waiting[0][0].size
                yield _first(waiting)
            waiting.append((part, pool.submit(seal, part, seeking)))
            held += part.size
        while waiting:
            yield _first(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _first(waiting: deque[tuple[chunks.Part, Future[Sealed]]]) -> tuple[chunks.Part, Sealed]:
    part, future = waiting.popleft()
    return part, future.result()


def _processors() -> int:
    return len(os.sched_getaffinity(0))
