"""Pack an environment into a bundle, in one pass over its files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Literal

import provision
from provision.env import collector
from provision.env.bundle import consistency, keys, tar
from provision.env.bundle.manifest import Chunk, Entry, Manifest, Mark, PrefixFiles
from provision.env.packing import chunks, large, reading, writer
from provision.env.packing.chunks import Large, Part
from provision.env.packing.frames import FrameMaker
from provision.env.packing.large import LargeFile
from provision.env.packing.marks import Seeking
from provision.env.packing.output import lies_in
from provision.env.packing.pipeline import Pipeline
from provision.env.packing.seal import Sealed, Traits
from provision.env.packing.workers import Place, Workers, processors, ranges_of
from provision.env.relocation.prefixes import Search
from provision.env.source import facts
from provision.env.source.scan import Found
from provision.env.source.survey import Survey, survey
from provision.errors import BundleError, UsageError
from provision.model import Emit, Notice, Progress, StageFinished, StageStarted

STAGE = "pack"

_WORTH_WORKERS = 16 << 20  # bytes of files; for fewer, starting a process takes longer than it saves
_HELD = 64 << 20  # bytes of prefix files that are kept until they are written; more are read a second time
_MOST_WORKERS = 8  # each takes some 60 MB, and what they have compressed is written by one process


def pack(
    prefix: Path,
    out: Path,
    *,
    name: str,
    emit: Emit,
    limit: int = chunks.LIMIT,
    source_prefix: str | None = None,
    notices: tuple[str, ...] = (),
    additions: Iterable[Found] = (),
    exclude: Sequence[str] = (),
    data: Sequence[Path] = (),
    split: int = 0,
) -> Manifest:
    """Pack the environment at ``prefix`` into the bundle ``out``.

    Args:
        prefix: the environment; see ``source.find_env``.
        out: the bundle; it appears under this name only when it is whole.
        name: what the environment is called.
        emit: told how many bytes of files have been packed.
        limit: bytes of a chunk; only tests have reason to change it.
        source_prefix: the prefix that its files name, if that is not ``prefix``; see ``survey``.
        notices: what the manifest's notices begin with.
        additions: files that are packed beside those of the environment, or in place of them.
        exclude: patterns of what is left out; see ``source.exclude``.
        data: files and folders that travel with it as ``data/NAME``.
        split: bytes of a part, if the bundle is written as parts ``out.000``, ``out.001`` and so on; else 0.

    Returns:
        The manifest that was written.

    Raises:
        UsageError: a file cannot be read, or ``out`` cannot be written.
        BundleError: the environment changed while it was packed.
    """
    started = time.monotonic()
    try:
        consistency.check_name(name)
    except ValueError as error:
        raise UsageError(
            f"the environment cannot be packed under its name: {error}", hint="rename it, and pack it again"
        ) from error
    for folder, what in ((prefix, "the environment"), *((path, f"the data {path}") for path in data)):
        if lies_in(out, folder):
            raise UsageError(f"{out} would lie inside {what}", hint="write the bundle elsewhere with --output")

    def run() -> Manifest:
        with writer.create(out, split=split) as bundle, Workers() as workers:
            pipeline = Pipeline(workers, limit)
            found = survey(
                prefix,
                source_prefix=source_prefix,
                exclude=exclude,
                data=data,
                additions=additions,
                on_file=None if exclude else partial(_begin, workers, pipeline, limit),
            )
            for text in found.notices:
                emit(Notice(text, "warning"))
            emit(StageStarted(STAGE, f"Packing {name}", found.size, "bytes"))
            seeking = Seeking(Search(found.relocations), found.owners.rooms, found.programs)
            if found.size > _WORTH_WORKERS:
                workers.start(_number())
            workers.seek(seeking)
            packing = _Packing(found, seeking, bundle, emit)
            packing.run(pipeline, limit)
            found.check_folders()
            manifest = packing.manifest(name, notices)
            _check(manifest)
            bundle.finish(manifest)
            return manifest

    with collector.paused():  # until all but the manifest is forgotten
        manifest = run()
    emit(StageFinished(STAGE, time.monotonic() - started))
    return manifest


def _check(manifest: Manifest) -> None:
    """See to it that the bundle can be opened again: what it holds may be arranged as nobody has thought of.

    Raises:
        BundleError: it could not.
    """
    try:
        consistency.check(manifest)
    except ValueError as error:
        raise BundleError(
            f"the environment cannot be packed: {error}", hint="leave out what is in the way: --exclude PATTERN"
        ) from error


def _begin(workers: Workers, pipeline: Pipeline, limit: int, found: Found) -> None:
    """Let workers begin with a large file while the survey goes on."""
    if found.size > max(limit, _WORTH_WORKERS):
        workers.start(_number())
        pipeline.begin(ranges_of(found, limit))


def _number() -> int:
    """How many workers there should be."""
    return min(processors(), _MOST_WORKERS)


class _Packing:
    """One pass: what has been written, and what is known of it."""

    def __init__(self, found: Survey, seeking: Seeking, bundle: writer.Writer, emit: Emit) -> None:
        self._survey = found
        self._seeking = seeking
        self._bundle = bundle
        self._emit = emit
        self._chunks: list[Chunk] = []
        self._entries: list[Entry] = []
        self._marked: list[tuple[Entry, Found, bytes | None]] = []  # without bytes: to be read again
        self._held = 0  # bytes of those
        self._traits = Traits()
        self._notices: list[str] = []
        self._done = 0

    def run(self, pipeline: Pipeline, limit: int) -> None:
        """Write every chunk, in the order of the plan, whichever is ready first."""
        plan = chunks.plan(self._survey.found, self._survey.owner, limit=limit, verbatim=self._survey.data.packages)
        for one in plan.large:
            self._large(one, pipeline, limit)
        for part in plan.parts:
            pipeline.add(part, partial(self._keep, part))
        pipeline.finish()

    def manifest(self, name: str, notices: tuple[str, ...]) -> Manifest:
        """Write the prefix files, and describe everything."""
        found, packages = self._survey, self._survey.owners.packages
        entries = sorted((*self._entries, *(entry for entry, _, _ in self._marked)), key=lambda entry: entry.path)
        versions = facts.versions(found.root, packages, found.sites)
        architectures = tuple(sorted(self._traits.architectures)) if versions["cuda"] else ()
        glibc = self._traits.glibc
        return Manifest(
            name=name,
            tool=provision.__version__,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            platform=facts.platform(found.root),
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
            notices=(*notices, *found.notices, *self._notices, *facts.notices(versions, architectures)),
        )

    def _keep(self, part: Part, sealed: Sealed, place: Place) -> None:
        """Write a tar chunk, and note the part's files."""
        index = (self._write(sealed, place, "tar", part.package),) if sealed.size else ()
        marked = {number: (marks, data) for number, marks, data in sealed.marked}
        at = 0
        for number, found in enumerate(part.found):
            digest = ""
            if found.type == "file":
                digest, at = sealed.digests[at : at + 64], at + 64
            if number in marked:
                marks, data = marked[number]
                fits = self._held + len(data) <= _HELD
                self._held += len(data) if fits else 0
                self._marked.append((_entry(found, digest, marks=marks), found, data if fits else None))
            else:
                self._entries.append(_entry(found, digest, chunks=index))
        self._traits = self._traits.merged(sealed.traits)
        self._advance(part.size)

    def _large(self, one: Large, pipeline: Pipeline, limit: int) -> None:
        """Look through a large file, and write it as raw ranges unless it is to be rewritten.

        Whether one is that may be rewritten is known when all of it was read; of others the ranges do not wait.
        """
        found = one.found
        ranges = ranges_of(found, limit)
        indexes: list[int] = []

        def keep(sealed: Sealed, place: Place) -> None:
            indexes.append(self._write(sealed, place, "raw", one.package))
            self._advance(sealed.size)

        with reading.opened(found) as descriptor:
            file = LargeFile(found, descriptor, None if one.verbatim else self._seeking, bound=large.BOUND)
            for part in ranges:
                if not file.is_rewritable:
                    pipeline.add(part, keep)
                file.read(part.offset, part.offset + part.size)
            marks, digest = file.marks(), file.digest
            self._traits = self._traits.merged(file.traits)
        if marks and file.is_rewritable:
            self._marked.append((_entry(found, digest, marks=marks), found, None))
            self._advance(found.size)
            return
        if file.is_rewritable:
            for part in ranges:
                pipeline.add(part, keep)
        elif marks:
            self._notices.append(
                f"{found.path} holds the prefix and is too large to be rewritten: it may not work elsewhere"
            )
            self._emit(Notice(self._notices[-1], "warning"))
        pipeline.then(lambda: self._note_large(_entry(found, digest, chunks=tuple(indexes), raw=True, marks=marks)))

    def _note_large(self, entry: Entry) -> None:
        """Note a large file whose ranges are written, and their keys, which its digest is part of."""
        self._entries.append(entry)
        offset = 0
        for index in entry.chunks:
            key = keys.of_range(entry.path, entry.mode, offset, entry.sha256)
            self._chunks[index] = replace(self._chunks[index], key=key)
            offset += self._chunks[index].size

    def _write(self, sealed: Sealed, place: Place, kind: Literal["tar", "raw"], package: str) -> int:
        """Give a chunk its place in the bundle; its index."""
        offset = self._bundle.next_data
        digest, key, size, compressed = sealed[:4]
        chunk = Chunk(digest, key, kind, package, size, compressed, offset)
        place(self._bundle.add_chunk(chunk))
        self._chunks.append(chunk)
        return len(self._chunks) - 1

    def _write_prefix_files(self) -> PrefixFiles:
        maker = FrameMaker()
        offset = self._bundle.next_data
        self._bundle.add_prefix_files(self._prefix_frames(maker))
        return PrefixFiles(maker.digest, maker.size, maker.compressed, offset)

    def _prefix_frames(self, maker: FrameMaker) -> Iterator[bytes]:
        for entry, found, data in sorted(self._marked, key=lambda one: one[0].path):
            if entry.type == "file":
                yield maker.add(tar.entry_header(entry))
                for block in [data] if data is not None else reading.again(found, entry.sha256):
                    yield maker.add(block)
                yield maker.add(bytes(tar.padding(entry.size)))
        yield maker.finish()

    def _advance(self, size: int) -> None:
        self._done += size
        self._emit(Progress(STAGE, self._done, self._survey.size))


def _entry(
    found: Found, digest: str, *, chunks: tuple[int, ...] = (), raw: bool = False, marks: tuple[Mark, ...] = ()
) -> Entry:
    """The manifest's entry for something that was found and read."""
    return Entry(
        found.path, found.type, found.mode, found.mtime, found.size, digest, found.target, chunks, raw=raw, marks=marks
    )
