"""Open, verify and read a bundle. Everything in it is checked before it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from provision.env.bundle import tar
from provision.env.bundle.layout import (
    BLOCK,
    INDEX,
    MANIFEST,
    BundleFiles,
    find_files,
    index_member,
    member_header,
    parts_missing,
)
from provision.env.bundle.manifest import (
    Chunk,
    Entry,
    Manifest,
    PrefixFiles,
    content_digest,
    key_of_members,
    key_of_range,
)
from provision.env.bundle.parse import LIMIT, check_format, parse
from provision.errors import BundleError
from provision.model import Emit
from provision.stages import stage
from trainer.agent.contract.untrusted import UntrustedError, parse_object

WINDOW = 128 << 20  # bytes of a zstd frame's window, which a reader holds in memory; `zstd --long=27` has as many


_LARGEST = 1 << 60  # bytes; no file is larger
_MOST_PARTS = 100_000


@dataclass(frozen=True)
class Bundle:
    """An open bundle. The manifest is checked; everything else is checked when it is read."""

    storage: BundleFiles
    manifest: Manifest

    @property
    def path(self) -> Path:
        """The bundle's name. No file has this name if the bundle was split."""
        return self.storage.path

    def chunk_compressed(self, index: int) -> Iterator[bytes]:
        """The compressed bytes of a chunk, in blocks; its digest is checked at the end.

        Raises:
            BundleError: it is damaged.
        """
        return read_compressed(self.storage, self.manifest.chunks[index])

    def chunk_blocks(self, index: int) -> Iterator[bytes]:
        """The uncompressed bytes of a chunk, in blocks; its digest is checked at the end.

        Raises:
            BundleError: it is damaged.
        """
        return read_member(self.storage, self.manifest.chunks[index])

    def prefix_files(self) -> dict[str, bytes]:
        """The files that depend on the prefix, by path, with their content in the source environment.

        Raises:
            BundleError: they are damaged.
        """
        member = self.manifest.prefix_files
        stream = Stream(read_member(self.storage, member))
        entries = self.manifest.rewritable
        files = {entry.path: b"".join(self._content(stream, entry, member.member)) for entry in entries}
        stream.drain()
        return files

    def verify(self, emit: Emit, only: Collection[int] | None = None) -> None:
        """Read and check every chunk, member header and file digest, and the bundle's own tar.

        Args:
            emit: receives the progress.
            only: the numbers of the chunks to check; None for all.

        Raises:
            BundleError: the bundle is damaged; the message names the member.
        """
        wanted = range(len(self.manifest.chunks)) if only is None else only
        total = sum(self.manifest.chunks[index].size for index in wanted)
        with stage(emit, "verify", f"Verifying {self.path}", total, "bytes") as shown:
            self._verify_headers()
            self.prefix_files()
            done = 0
            pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
            try:
                running = {pool.submit(job): size for size, job in self._jobs(wanted)}
                for future in as_completed(running):
                    future.result()
                    done += running[future]
                    shown.progress(done)
            finally:
                pool.shutdown(cancel_futures=True)
            shown.summary = f"{len(wanted)} chunks are intact"

    def _jobs(self, wanted: Collection[int]) -> Iterator[tuple[int, Callable[[], None]]]:
        """Checks that can run in parallel, of large files and tar chunks, with their sizes."""
        for entry in self.manifest.files:
            if entry.raw and any(index in wanted for index in entry.chunks):
                yield entry.size, partial(self._verify_large, entry)
        for index, chunk in enumerate(self.manifest.chunks):
            if chunk.kind == "tar" and index in wanted:
                yield chunk.size, partial(self._verify_tar, index)

    def _verify_tar(self, index: int) -> None:
        """Compare a chunk with the tar stream of its entries."""
        chunk = self.manifest.chunks[index]
        stream = Stream(self.chunk_blocks(index))
        digests = [(entry, self._key_digest(stream, entry, chunk.member)) for entry in self.manifest.members(index)]
        stream.drain()
        if key_of_members(digests) != chunk.key:
            raise BundleError(f"{self.path}: {chunk.member} has the wrong key")

    def _key_digest(self, stream: Stream, entry: Entry, member: str) -> str:
        """Check the next member, and return its ``content_digest``."""
        if entry.path.endswith(".pyc"):
            return content_digest(entry.path, b"".join(self._content(stream, entry, member)))
        for _ in self._content(stream, entry, member):
            pass
        return entry.sha256

    def _verify_large(self, entry: Entry) -> None:
        digest = hashlib.sha256()
        offset = 0
        for index in entry.chunks:
            chunk = self.manifest.chunks[index]
            if chunk.key != key_of_range(entry.path, entry.mode, offset, entry.sha256):
                raise BundleError(f"{self.path}: {chunk.member} has the wrong key for a range of {entry.path!r}")
            offset += chunk.size
            for block in self.chunk_blocks(index):
                digest.update(block)
        if digest.hexdigest() != entry.sha256:
            raise BundleError(f"{self.path}: {entry.path!r} has another sha256 than in the manifest")

    def _content(self, stream: Stream, entry: Entry, member: str) -> Iterator[memoryview]:
        """The data of the next member of a tar stream, which must equal ``entry`` in every byte."""
        good = stream.take(tar.header_size(entry)) == tar.entry_header(entry)
        digest = hashlib.sha256()
        for piece in stream.pieces(entry.size):
            digest.update(piece)
            yield piece
        good = good and not any(stream.take(tar.padding(entry.size)))
        if not good or (entry.type == "file" and digest.hexdigest() != entry.sha256):
            stream.drain()  # checks for damage on the disk first
            raise BundleError(
                f"{self.path}: {entry.path!r} in {member} differs from the manifest",
                hint="copy the bundle again, and compare its sha256 with the original's",
            )

    def _verify_headers(self) -> None:
        """Check the headers of members and the padding after them, which no digest covers."""
        at = 2 * tar.BLOCK
        for member in self.manifest.stored:
            size = member.compressed
            head = self.storage.take(at, tar.BLOCK)
            padding = self.storage.take(member.offset + size, tar.padding(size))
            at += tar.BLOCK
            if member.offset != at or head != member_header(member.member, size) or any(padding):
                raise self.storage.damaged(member.member, at - tar.BLOCK, tar.BLOCK + size + tar.padding(size))
            at += size + tar.padding(size)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle: read its index and its manifest.

    Args:
        path: the bundle, or for a split one its name, any part, or the list of checksums.

    Raises:
        UsageError: the file cannot be read.
        BundleError: it is not a bundle, damaged, incomplete or too new.
    """
    found = find_files(path)
    index = _index(found)
    offset, size = index["manifest_offset"], index["manifest_size"]
    if size > LIMIT:
        raise BundleError(
            f"{found.path}: its manifest has {size} bytes, more than the limit of {LIMIT}",
            hint="copy the bundle again, or pack fewer files: clusterctl pack-env --exclude PATTERN",
        )
    end = offset + size + tar.padding(size) + len(tar.END)
    try:
        found = _measure_files(found, index["split"] if found.is_split else end, end)
    except BundleError as error:
        raise found.unlisted(found.files[0]) or error from error  # the expected size is from its index
    around = found.take(offset - tar.BLOCK, end - offset + tar.BLOCK)
    head, data, rest = around[: tar.BLOCK], around[tar.BLOCK : tar.BLOCK + size], around[tar.BLOCK + size :]
    if hashlib.sha256(data).hexdigest() != index["manifest_sha256"]:
        raise found.damaged(MANIFEST, offset, size)
    if head != member_header(MANIFEST, size) or any(rest):
        raise found.damaged(MANIFEST, offset - tar.BLOCK, end - offset + tar.BLOCK)
    try:
        manifest = parse(data)
    except BundleError as error:
        raise BundleError(f"{found.path}: {error}", hint=error.hint) from error
    for member in manifest.stored:
        if member.offset + member.compressed > offset:
            raise BundleError(f"{found.path}: {member.member} is after the manifest")
    return Bundle(found, manifest)


def _measure_files(found: BundleFiles, length: int, end: int) -> BundleFiles:
    """Check the files of a bundle of ``end`` bytes, in parts of ``length`` bytes. Further files do not belong to it.

    Raises:
        BundleError: a file is missing, or has the wrong size.
    """
    if length <= 0:
        raise BundleError(f"{found.files[0]} is not a part of a split bundle")
    if end > length * _MOST_PARTS:
        raise BundleError(
            f"{found.files[0]} is of a bundle with more than {_MOST_PARTS} parts, the limit", hint="copy it again"
        )
    wanted = [min(length, end - begin) for begin in range(0, end, length)]
    if len(wanted) > len(found.files):
        width = len(found.files[0].suffix) - 1
        names = [f"{found.path.name}.{number:0{width}}" for number in range(len(found.files), len(wanted))]
        raise parts_missing(found.path, names)
    for file, size, want in zip(found.files, found.sizes, wanted, strict=False):
        if size < want:
            missing = ", and its manifest at the end is missing" if want == end else ""
            raise BundleError(f"{file} is truncated: it has {size} of {want} bytes{missing}", hint="copy it again")
        if size > want:
            raise BundleError(f"{file} is too long: it has {size} bytes instead of {want}", hint="copy it again")
    return replace(found, files=found.files[: len(wanted)], sizes=found.sizes[: len(wanted)])


def _index(found: BundleFiles) -> dict[str, Any]:
    """Read and check the first member: the format must be known, and the numbers valid."""
    path = found.files[0]
    start = found.take(0, min(found.size, 2 * tar.BLOCK))
    foreign = BundleError(f"{path} is not a clusterctl bundle", hint="to create one: clusterctl pack-env")
    if len(start) < 2 * tar.BLOCK:
        raise BundleError(f"{path} is truncated: it has {len(start)} bytes, less than a bundle's index")
    try:
        index = parse_object(start[tar.BLOCK :], depth=1)
    except UntrustedError as error:
        raise foreign from error
    if index.get("magic") != INDEX:
        raise foreign
    check_format(index.get("format"))
    numbers: list[Any] = [index.get(name) for name in ("manifest_offset", "manifest_size", "split")]
    digest = index.get("manifest_sha256")
    if not (all(type(number) is int and 0 <= number < _LARGEST for number in numbers) and isinstance(digest, str)):
        raise found.damaged(INDEX, 0, len(start))
    offset, size, split = numbers
    if not (offset and size) or start != index_member(offset, size, digest, split):
        raise found.damaged(INDEX, 0, len(start))
    return index


def read_compressed(storage: BundleFiles, member: Chunk | PrefixFiles) -> Iterator[bytes]:
    """The compressed bytes of a member; its digest is checked at the end.

    Raises:
        BundleError: it is damaged.
    """
    digest = hashlib.sha256()
    for block in storage.read(member.offset, member.compressed):
        digest.update(block)
        yield block
    if digest.hexdigest() != member.digest:
        raise storage.damaged(member.member, member.offset, member.compressed)


def read_member(storage: BundleFiles, member: Chunk | PrefixFiles) -> Iterator[bytes]:
    """The uncompressed bytes of a member, as many as the manifest says; its digest is checked at the end.

    Raises:
        BundleError: it is damaged.
    """
    left = member.size
    source = _Source(read_compressed(storage, member))
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        cast("IO[bytes]", source)  # it only calls read
    )
    try:
        while block := reader.read(BLOCK):
            left -= len(block)
            if left < 0:
                raise storage.damaged(member.member, member.offset, member.compressed)
            yield block
    except zstandard.ZstdError as error:
        source.drain()  # checks for damage on the disk first
        raise storage.damaged(member.member, member.offset, member.compressed) from error
    source.drain()
    if left:
        raise storage.damaged(member.member, member.offset, member.compressed)


class Stream:
    """Divides blocks into pieces of given sizes."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = memoryview(b"")

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes in pieces, fewer at the end. Take all pieces before the next call."""
        while size:
            if not self._block:
                self._block = memoryview(next(self._blocks, b""))
                if not self._block:
                    return
            piece = self._block[:size]
            self._block = self._block[size:]
            size -= len(piece)
            yield piece

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        return b"".join(self.pieces(size))

    def drain(self) -> None:
        """Read to the end, where the digest is checked."""
        for _ in self._blocks:
            pass


class _Source:
    """Blocks as a file for zstandard."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks

    def read(self, _size: int = -1) -> bytes:
        return next(self._blocks, b"")

    def drain(self) -> None:
        for _ in self._blocks:
            pass
