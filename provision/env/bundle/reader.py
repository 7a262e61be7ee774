"""Open, verify and read a bundle. Nothing in it is believed before it is checked."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from provision.env.bundle import keys, members, slices, tar
from provision.env.bundle.manifest import Entry, Manifest
from provision.env.bundle.parse import LIMIT, check_format, parse
from provision.env.bundle.slices import Slices
from provision.env.packing import writer
from provision.errors import BundleError
from provision.model import Emit, Progress, StageFinished, StageStarted
from trainer.untrusted import UntrustedError, parse_object

STAGE = "verify"

_LARGEST = 1 << 60  # bytes; no file is larger
_MOST_PARTS = 100_000


@dataclass(frozen=True)
class Bundle:
    """An open bundle: its manifest is checked already, everything else is checked whenever it is read."""

    slices: Slices
    manifest: Manifest

    @property
    def path(self) -> Path:
        """The bundle, as people name it; it was split if there is no such file."""
        return self.slices.path

    def chunk_compressed(self, index: int) -> Iterator[bytes]:
        """A chunk as it lies in the bundle, in blocks; whether it is whole is known at the end.

        Raises:
            BundleError: the bytes are not those of the manifest.
        """
        return members.compressed(self.slices, self.manifest.chunks[index])

    def chunk_blocks(self, index: int) -> Iterator[bytes]:
        """A chunk's own bytes, in blocks; whether they are right is known at the end.

        Raises:
            BundleError: the bytes are not those of the manifest.
        """
        return members.decompressed(self.slices, self.manifest.chunks[index])

    def prefix_files(self) -> dict[str, bytes]:
        """The files that depend on the prefix, as they were in the source, by path.

        Raises:
            BundleError: they are damaged, or not those of the manifest.
        """
        member = self.manifest.prefix_files
        stream = members.Stream(members.decompressed(self.slices, member))
        entries = self.manifest.rewritable
        files = {entry.path: b"".join(self._content(stream, entry, member.member)) for entry in entries}
        stream.drain()
        return files

    def verify(self, emit: Emit, only: Collection[int] | None = None) -> None:
        """Read everything once: every chunk, every member's header, every file's digest, and the bundle's own tar.

        Args:
            emit: told the progress.
            only: read these chunks alone, by their numbers, and no others.

        Raises:
            BundleError: something is not what the manifest says; the message names it.
        """
        started = time.monotonic()
        wanted = range(len(self.manifest.chunks)) if only is None else only
        total = sum(self.manifest.chunks[index].size for index in wanted)
        emit(StageStarted(STAGE, f"Verifying {self.path}", total, "bytes"))
        self._verify_outside()
        self.prefix_files()
        done = 0
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            running = {pool.submit(job): size for size, job in self._jobs(wanted)}
            for future in as_completed(running):
                future.result()
                done += running[future]
                emit(Progress(STAGE, done, total))
        finally:
            pool.shutdown(cancel_futures=True)
        emit(StageFinished(STAGE, time.monotonic() - started, summary=f"{len(wanted)} chunks are whole"))

    def _jobs(self, wanted: Collection[int]) -> Iterator[tuple[int, Callable[[], None]]]:
        """What can be verified side by side, and its size: large files and tar chunks."""
        for entry in self.manifest.files:
            if entry.raw and any(index in wanted for index in entry.chunks):
                yield entry.size, partial(self._verify_large, entry)
        for index, chunk in enumerate(self.manifest.chunks):
            if chunk.kind == "tar" and index in wanted:
                yield chunk.size, partial(self._verify_tar, index)

    def _verify_tar(self, index: int) -> None:
        """Compare a chunk's stream with the one that its entries make."""
        chunk = self.manifest.chunks[index]
        stream = members.Stream(self.chunk_blocks(index))
        told = [(entry, self._told(stream, entry, chunk.member)) for entry in self.manifest.members(index)]
        stream.drain()
        if keys.of_members(told) != chunk.key:
            raise BundleError(f"{self.path}: the key of {chunk.member} is not that of its members")

    def _told(self, stream: members.Stream, entry: Entry, member: str) -> str:
        """What the content of the next member counts in its chunk's key."""
        if entry.path.endswith(".pyc"):
            return keys.content(entry.path, b"".join(self._content(stream, entry, member)))
        for _ in self._content(stream, entry, member):
            pass
        return entry.sha256

    def _verify_large(self, entry: Entry) -> None:
        digest = hashlib.sha256()
        offset = 0
        for index in entry.chunks:
            chunk = self.manifest.chunks[index]
            if chunk.key != keys.of_range(entry.path, entry.mode, offset, entry.sha256):
                raise BundleError(f"{self.path}: the key of {chunk.member} is not that of a range of {entry.path!r}")
            offset += chunk.size
            for block in self.chunk_blocks(index):
                digest.update(block)
        if digest.hexdigest() != entry.sha256:
            raise BundleError(f"{self.path}: {entry.path!r} is not the file that the manifest describes")

    def _content(self, stream: members.Stream, entry: Entry, member: str) -> Iterator[memoryview]:
        """The data of the next member of a tar stream, which must be ``entry`` to the byte."""
        good = stream.take(tar.header_size(entry)) == tar.entry_header(entry)
        digest = hashlib.sha256()
        for piece in stream.pieces(entry.size):
            digest.update(piece)
            yield piece
        good = good and not any(stream.take(tar.padding(entry.size)))
        if not good or (entry.type == "file" and digest.hexdigest() != entry.sha256):
            stream.drain()  # where damage on the disk is noticed
            raise BundleError(
                f"{self.path}: {member} does not hold {entry.path!r} as the manifest describes it",
                hint="copy the bundle again and compare its sha256 with the original's",
            )

    def _verify_outside(self) -> None:
        """The headers of the members and what fills their last blocks, which no digest covers."""
        at = 2 * tar.BLOCK
        for member in self.manifest.stored:
            size = member.compressed
            head = self.slices.take(at, tar.BLOCK)
            filling = self.slices.take(member.offset + size, tar.padding(size))
            at += tar.BLOCK
            if member.offset != at or head != writer.member_header(member.member, size) or any(filling):
                raise self.slices.damaged(member.member, at - tar.BLOCK, tar.BLOCK + size + tar.padding(size))
            at += size + tar.padding(size)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle; reads its index and its manifest, and nothing else.

    Args:
        path: the bundle; of one that was split its name, any of its parts, or the list of their check sums.

    Raises:
        UsageError: the file cannot be read.
        BundleError: it is no bundle, truncated, damaged, too new, lacks a part, or its manifest is not valid.
    """
    found = slices.find(path)
    index = _index(found)
    offset, size = index["manifest_offset"], index["manifest_size"]
    if size > LIMIT:
        raise BundleError(
            f"{found.path}: its manifest has {size} bytes, more than the {LIMIT} that are read",
            hint="copy the bundle again, or pack it again with fewer files: clusterctl pack-env --exclude PATTERN",
        )
    end = offset + size + tar.padding(size) + len(tar.END)
    try:
        found = _measured(found, index["split"] if found.is_split else end, end)
    except BundleError as error:
        raise found.unlisted(found.files[0]) or error from error  # its index tells how long they must be
    around = found.take(offset - tar.BLOCK, end - offset + tar.BLOCK)
    head, data, rest = around[: tar.BLOCK], around[tar.BLOCK : tar.BLOCK + size], around[tar.BLOCK + size :]
    if hashlib.sha256(data).hexdigest() != index["manifest_sha256"]:
        raise found.damaged(writer.MANIFEST, offset, size)
    if head != writer.member_header(writer.MANIFEST, size) or any(rest):
        raise found.damaged(writer.MANIFEST, offset - tar.BLOCK, end - offset + tar.BLOCK)
    try:
        manifest = parse(data)
    except BundleError as error:
        raise BundleError(f"{found.path}: {error}", hint=error.hint) from error
    for member in manifest.stored:
        if member.offset + member.compressed > offset:
            raise BundleError(f"{found.path}: {member.member} lies behind the manifest")
    return Bundle(found, manifest)


def _measured(found: Slices, length: int, end: int) -> Slices:
    """The files of a bundle of ``end`` bytes, each but the last ``length`` bytes long; what lies beside them is not it.

    Raises:
        BundleError: one is missing, or not as long as it must be.
    """
    if length <= 0:
        raise BundleError(f"{found.files[0]} is no part of a bundle that was split")
    if end > length * _MOST_PARTS:
        raise BundleError(
            f"{found.files[0]} says that the bundle has more than {_MOST_PARTS} parts", hint="copy it again"
        )
    wanted = [min(length, end - begin) for begin in range(0, end, length)]
    if len(wanted) > len(found.files):
        width = len(found.files[0].suffix) - 1
        names = [f"{found.path.name}.{number:0{width}}" for number in range(len(found.files), len(wanted))]
        raise slices.lacking(found.path, names)
    for file, size, want in zip(found.files, found.sizes, wanted, strict=False):
        if size < want:
            missing = ", and its manifest at the end is missing" if want == end else ""
            raise BundleError(f"{file} is truncated: it has {size} bytes of {want}{missing}", hint="copy it again")
        if size > want:
            raise BundleError(f"{file} goes on after its end: {size} bytes of {want}", hint="copy it again")
    return replace(found, files=found.files[: len(wanted)], sizes=found.sizes[: len(wanted)])


def _index(found: Slices) -> dict[str, Any]:
    """The first member's data, as far as it can be trusted: a known format, and numbers."""
    path = found.files[0]
    start = found.take(0, min(found.size, 2 * tar.BLOCK))
    foreign = BundleError(f"{path} is not a bundle of clusterctl", hint="to write one: clusterctl pack-env")
    if len(start) < 2 * tar.BLOCK:
        raise BundleError(f"{path} is truncated: it has {len(start)} bytes, and not even the index of a bundle")
    try:
        index = parse_object(start[tar.BLOCK :], depth=1)
    except UntrustedError as error:
        raise foreign from error
    if index.get("magic") != writer.INDEX:
        raise foreign
    check_format(index.get("format"))
    numbers: list[Any] = [index.get(name) for name in ("manifest_offset", "manifest_size", "split")]
    digest = index.get("manifest_sha256")
    if not (all(type(number) is int and 0 <= number < _LARGEST for number in numbers) and isinstance(digest, str)):
        raise found.damaged(writer.INDEX, 0, len(start))
    offset, size, split = numbers
    if not (offset and size) or start != writer.index_member(offset, size, digest, split):
        raise found.damaged(writer.INDEX, 0, len(start))
    return index
