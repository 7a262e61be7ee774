"""Pack an environment into a bundle: survey its files, write them in chunks, seal the bundle.

A ``Source`` is a file, link or folder to pack. Sources become a ``Chunk`` together, and one ``Entry`` of the manifest
each. The ``Writer`` writes the chunks and the manifest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import provision
from provision.env.bundle import parse, tar
from provision.env.bundle.manifest import Chunk, Entry, Manifest, PrefixFiles, key_of_range, pause_collector
from provision.env.packing import detect
from provision.env.packing.chunks import LIMIT, Group, PackedChunk, Plan, Range, large_ranges, plan_chunks, split_ranges
from provision.env.packing.detect import LargeFile, PrefixDetector, Traits
from provision.env.packing.workers import Task, Workers
from provision.env.packing.writer import Writer, create_bundle, is_inside
from provision.env.relocation import Search
from provision.env.source import files
from provision.env.source.environment import find_platform, missing_facts, python_version, stack_versions
from provision.env.source.files import Source
from provision.env.source.survey import Survey, scan_environment, survey
from provision.errors import BundleError, UsageError
from provision.model import Emit, Notice
from provision.stages import Stage, stage

HELD = 64 << 20  # bytes of prefix files kept in memory until they are written; further ones are read a second time


@dataclass(frozen=True)
class PackOptions:
    """Options of ``pack``.

    Attributes:
        limit: bytes of a chunk.
        processes: worker processes; None for one per processor.
        source_prefix: the prefix that the environment's files name, if it was moved from there.
        notices: first notices of the manifest.
        additions: files to pack in addition to the environment's own, or in their place.
        exclude: patterns of paths to exclude; see ``survey.exclude_sources``.
        data: files and folders to pack as ``data/NAME``.
        split: bytes of a part, to write the bundle as ``out.000``, ``out.001`` and so on; 0 for one file.
    """

    limit: int = LIMIT
    processes: int | None = None
    source_prefix: str | None = None
    notices: tuple[str, ...] = ()
    additions: Iterable[Source] = ()
    exclude: Sequence[str] = ()
    data: Sequence[Path] = ()
    split: int = 0


_DEFAULT = PackOptions()


def pack(prefix: Path, out: Path, *, name: str, emit: Emit, options: PackOptions = _DEFAULT) -> Manifest:
    """Pack the environment at ``prefix`` into the bundle ``out``.

    Args:
        prefix: the environment; see ``environment.find_env``.
        out: the bundle. It gets this name when it is complete.
        name: the environment's name.
        emit: receives the progress in bytes of files.
        options: further options.

    Returns:
        The manifest of the bundle.

    Raises:
        UsageError: a file cannot be read, or ``out`` cannot be written.
        BundleError: the environment changed during packing.
    """
    _check_arguments(prefix, out, name, options.data)
    with (
        ExitStack() as finished,  # the stage ends after the bundle has its name
        pause_collector(),
        create_bundle(out, split=options.split) as writer,
        Workers(options.limit, options.processes) as workers,
    ):
        found = _survey(prefix, workers, options)
        for text in found.notices:
            emit(Notice(text, "warning"))
        shown = finished.enter_context(stage(emit, "pack", f"Packing {name}", found.size, "bytes"))
        packing = _Packing(found, writer, emit, shown, options.limit)
        packing.write_chunks(workers)
        return packing.seal(name, options.notices)


def _survey(prefix: Path, workers: Workers, options: PackOptions) -> Survey:
    """Survey the environment; the ranges of its large files are compressed meanwhile."""
    environment = scan_environment(prefix, exclude=options.exclude, additions=options.additions)
    workers.start(environment.size)
    workers.prefetch(large_ranges(environment.sources.values(), options.limit))
    return survey(environment, source_prefix=options.source_prefix, data=options.data)


class _Packing:
    """Writes the chunks of a bundle, records their files, and seals it with the manifest."""

    def __init__(self, found: Survey, writer: Writer, emit: Emit, shown: Stage, limit: int) -> None:
        self._detector = PrefixDetector(Search(found.relocations), found.owners.rooms, found.programs)
        self._survey = found
        self._writer = writer
        self._emit = emit
        self._stage = shown
        self._limit = limit
        self._chunks: list[Chunk] = []
        self._ranges: defaultdict[str, list[int]] = defaultdict(list)  # numbers of raw chunks, by path
        self._large: list[Entry] = []
        self._entries: list[Entry] = []
        self._marked: list[tuple[Entry, Source, bytes | None]] = []  # None: the content is read again
        self._held = 0  # bytes of the contents in memory
        self._traits = Traits()
        self._notices: list[str] = []
        self._done = 0

    def write_chunks(self, workers: Workers) -> None:
        """Compress and write all chunks."""
        found = self._survey
        plan = plan_chunks(found.sources, found.owner, limit=self._limit, verbatim=found.data.packages)
        workers.start(found.size)
        workers.use_detector(self._detector)
        for task, packed in workers.compress(self._tasks(plan)):
            self._write_chunk(task, packed)

    def seal(self, name: str, notices: tuple[str, ...]) -> Manifest:
        """Write the files that contain the prefix, and the manifest.

        Raises:
            BundleError: the environment changed, or the bundle could not be opened again.
        """
        self._survey.check_folders()
        manifest = self._describe(name, notices, self._writer.add_prefix_files(self._prefix_stream()))
        try:
            parse.check(manifest)
        except ValueError as error:
            raise BundleError(
                f"the environment cannot be packed: {error}", hint="exclude the path: --exclude PATTERN"
            ) from error
        self._writer.seal(manifest)
        return manifest

    def _tasks(self, plan: Plan) -> Iterator[Task]:
        """What to compress, in the order of the bundle."""
        for source in plan.large:
            yield from self._large_tasks(source)
        yield from plan.groups

    def _write_chunk(self, task: Task, packed: PackedChunk) -> None:
        """Write a chunk, and record its files."""
        if isinstance(task, Range):
            self._ranges[task.source.path].append(len(self._chunks))
            self._chunks.append(self._writer.add_chunk(packed, self._survey.owner(task.source.path)))
        else:
            chunks = (len(self._chunks),) if packed.size else ()
            if packed.size:
                self._chunks.append(self._writer.add_chunk(packed, task.package))
            self._record_group(task, packed, chunks)
        self._advance(task.size)

    def _prefix_stream(self) -> Iterator[bytes]:
        """The tar stream of the files that contain the prefix."""
        for entry, source, content in sorted(self._marked, key=lambda one: one[0].path):
            if entry.type == "file":
                yield tar.entry_header(entry)
                yield from [content] if content is not None else files.read_again(source, entry.sha256)
                yield bytes(tar.padding(entry.size))

    def _describe(self, name: str, notices: tuple[str, ...], prefix_files: PrefixFiles) -> Manifest:
        """The manifest of the written files."""
        found, packages = self._survey, self._survey.owners.packages
        large = [self._finish_large(entry) for entry in self._large]
        files = [*self._entries, *large, *(entry for entry, _, _ in self._marked)]
        files.sort(key=lambda entry: entry.path)
        versions = stack_versions(found.root, packages, found.sites)
        architectures = tuple(sorted(self._traits.architectures)) if versions["cuda"] else ()
        glibc = self._traits.glibc
        return Manifest(
            name=name,
            tool=provision.__version__,
            created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            platform=find_platform(found.root),
            python=python_version(packages, (entry.path for entry in files)),
            source_prefix=found.prefix,
            chunks=tuple(self._chunks),
            prefix_files=prefix_files,
            files=tuple(files),
            relocations=found.relocations,
            packages=packages,
            glibc=f"{glibc[0]}.{glibc[1]}" if glibc else None,
            versions=versions,
            gpu_architectures=architectures or None,
            notices=(*notices, *found.notices, *self._notices, *missing_facts(versions, architectures)),
        )

    def _large_tasks(self, source: Source) -> Iterator[Range]:
        """Read a large file for its hash and marks, and yield its ranges unless it will be rewritten.

        Whether a file will be rewritten is known at its end. The ranges of a file too large for that do not wait.
        """
        ranges = split_ranges(source, self._limit)
        is_data = self._survey.owner(source.path) in self._survey.data.packages
        with files.open_source(source) as descriptor:
            detector = None if is_data else self._detector
            file = LargeFile(source, descriptor, detector, rewritable=detect.REWRITABLE)
            for part in ranges:
                if not file.is_rewritable:
                    yield part
                file.read(part.offset, part.offset + part.size)
            marks, digest = file.marks(), file.digest
            self._traits = self._traits.merged(file.traits)
        if marks and file.is_rewritable:
            self._marked.append((source.entry(digest, marks=marks), source, None))
            self._advance(source.size)
            return
        if marks:
            self._notices.append(
                f"{source.path} contains the prefix and is too large to be rewritten: it may not work on the nodes"
            )
            self._emit(Notice(self._notices[-1], "warning"))
        self._large.append(source.entry(digest, marks=marks))
        if file.is_rewritable:
            yield from ranges

    def _record_group(self, group: Group, packed: PackedChunk, chunks: tuple[int, ...]) -> None:
        for number, source in enumerate(group.sources):
            digest = packed.digests.get(number, "")
            if number in packed.marked:
                marks, content = packed.marked[number]
                fits = self._held + len(content) <= HELD
                self._held += len(content) if fits else 0
                self._marked.append((source.entry(digest, marks=marks), source, content if fits else None))
            else:
                self._entries.append(source.entry(digest, chunks=chunks))
        self._traits = self._traits.merged(packed.traits)

    def _finish_large(self, entry: Entry) -> Entry:
        """Set the chunks of a large file, and their keys, which depend on the file's digest."""
        offset = 0
        for number in self._ranges[entry.path]:
            key = key_of_range(entry.path, entry.mode, offset, entry.sha256)
            self._chunks[number] = replace(self._chunks[number], key=key)
            offset += self._chunks[number].size
        return replace(entry, chunks=tuple(self._ranges[entry.path]), raw=True)

    def _advance(self, size: int) -> None:
        self._done += size
        self._stage.progress(self._done)


def _check_arguments(prefix: Path, out: Path, name: str, data: Sequence[Path]) -> None:
    try:
        parse.check_name(name)
    except ValueError as error:
        raise UsageError(
            f"the environment cannot be packed under its name: {error}", hint="rename it, then pack it again"
        ) from error
    for folder, what in ((prefix, "the environment"), *((path, f"the data {path}") for path in data)):
        if is_inside(out, folder):
            raise UsageError(f"{out} would be inside {what}", hint="write the bundle elsewhere with --output")
