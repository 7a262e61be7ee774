"""Open, verify and read a bundle. Nothing in it is believed before it is checked."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from provision.env import members, tar, writer
from provision.env.manifest import Entry, Manifest
from provision.env.parse import check_format, parse
from provision.errors import BundleError, UsageError
from provision.model import Emit, Progress, StageFinished, StageStarted

STAGE = "verify"

_LARGEST = 1 << 60  # bytes; no file is larger


@dataclass(frozen=True)
class Bundle:
    """An open bundle: its manifest is checked already, everything else is checked whenever it is read."""

    path: Path
    manifest: Manifest

    def chunk_compressed(self, index: int) -> Iterator[bytes]:
        """A chunk as it lies in the bundle, in blocks; whether it is whole is known at the end.

        Raises:
            BundleError: the bytes are not those of the manifest.
        """
        return members.compressed(self.path, self.manifest.chunks[index])

    def chunk_blocks(self, index: int) -> Iterator[bytes]:
        """A chunk's own bytes, in blocks; whether they are right is known at the end.

        Raises:
            BundleError: the bytes are not those of the manifest.
        """
        return members.decompressed(self.path, self.manifest.chunks[index])

    def prefix_files(self) -> dict[str, bytes]:
        """The files that depend on the prefix, as they were in the source, by path.

        Raises:
            BundleError: they are damaged, or not those of the manifest.
        """
        member = self.manifest.prefix_files
        stream = members.Stream(members.decompressed(self.path, member))
        entries = [entry for entry in self.manifest.marked if entry.type == "file"]
        files = {entry.path: b"".join(self._content(stream, entry, member.member)) for entry in entries}
        stream.drain()
        return files

    def verify(self, emit: Emit) -> None:
        """Read everything once: every chunk, every member's header, every file's digest, and the bundle's own tar.

        Raises:
            BundleError: something is not what the manifest says; the message names it.
        """
        started = time.monotonic()
        total = sum(chunk.size for chunk in self.manifest.chunks)
        emit(StageStarted(STAGE, f"Verifying {self.path}", total, "bytes"))
        self._verify_outside()
        self.prefix_files()
        done = 0
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            running = {pool.submit(job): size for size, job in self._jobs()}
            for future in as_completed(running):
                future.result()
                done += running[future]
                emit(Progress(STAGE, done, total))
        finally:
            pool.shutdown(cancel_futures=True)
        emit(StageFinished(STAGE, time.monotonic() - started, summary=f"{len(self.manifest.chunks)} chunks are whole"))

    def _jobs(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """What can be verified side by side, and its size: large files and tar chunks."""
        for entry in self.manifest.files:
            if entry.raw:
                yield entry.size, partial(self._verify_large, entry)
        for index, chunk in enumerate(self.manifest.chunks):
            if chunk.kind == "tar":
                yield chunk.size, partial(self._verify_tar, index)

    def _verify_tar(self, index: int) -> None:
        """Compare a chunk's stream with the one that its entries make."""
        stream = members.Stream(self.chunk_blocks(index))
        for entry in self.manifest.members(index):
            for _ in self._content(stream, entry, self.manifest.chunks[index].member):
                pass
        stream.drain()

    def _verify_large(self, entry: Entry) -> None:
        digest = hashlib.sha256()
        for index in entry.chunks:
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
            raise BundleError(
                f"{self.path}: {member} does not hold {entry.path!r} as the manifest describes it",
                hint="copy the bundle again and compare its sha256 with the original's",
            )

    def _verify_outside(self) -> None:
        """The headers of the members and what fills their last blocks, which no digest covers."""
        at = 2 * tar.BLOCK
        for member in self.manifest.stored:
            size = member.compressed
            head = b"".join(members.read_range(self.path, at, tar.BLOCK))
            filling = b"".join(members.read_range(self.path, member.offset + size, tar.padding(size)))
            at += tar.BLOCK
            if member.offset != at or head != writer.member_header(member.member, size) or any(filling):
                raise members.damaged(self.path, member.member)
            at += size + tar.padding(size)


def open_bundle(path: Path) -> Bundle:
    """Open a bundle; reads its index and its manifest, and nothing else.

    Raises:
        UsageError: the file cannot be read.
        BundleError: it is no bundle, truncated, damaged, too new, or its manifest is not valid.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file", hint="clusterctl pack-env writes a bundle")
    length = path.stat().st_size
    index = _index(path, length)
    offset, size = index["manifest_offset"], index["manifest_size"]
    end = offset + size + tar.padding(size) + len(tar.END)
    if length < end:
        raise BundleError(
            f"{path} is truncated: it has {length} bytes of {end}, and its manifest at the end is missing",
            hint="copy the bundle again",
        )
    if length > end:
        raise BundleError(f"{path} goes on after its end: {length} bytes of {end}", hint="copy the bundle again")
    data = b"".join(members.read_range(path, offset, size))
    head = b"".join(members.read_range(path, offset - tar.BLOCK, tar.BLOCK))
    rest = b"".join(members.read_range(path, offset + size, length - offset - size))
    if hashlib.sha256(data).hexdigest() != index["manifest_sha256"]:
        raise members.damaged(path, writer.MANIFEST)
    if head != writer.member_header(writer.MANIFEST, size) or any(rest):
        raise members.damaged(path, writer.MANIFEST)
    try:
        manifest = parse(data)
    except BundleError as error:
        raise BundleError(f"{path}: {error}", hint=error.hint) from error
    for member in manifest.stored:
        if member.offset + member.compressed > offset:
            raise BundleError(f"{path}: {member.member} lies behind the manifest")
    return Bundle(path, manifest)


def _index(path: Path, length: int) -> dict[str, Any]:
    """The first member's data, as far as it can be trusted: a known format, and numbers."""
    start = b"".join(members.read_range(path, 0, min(length, 2 * tar.BLOCK)))
    foreign = BundleError(f"{path} is not a bundle of clusterctl", hint="clusterctl pack-env writes one")
    if len(start) < 2 * tar.BLOCK:
        raise BundleError(f"{path} is truncated: it has {length} bytes, and not even the index of a bundle")
    try:
        index = json.loads(start[tar.BLOCK :].decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise foreign from error
    if not isinstance(index, dict) or index.get("magic") != writer.INDEX:
        raise foreign
    check_format(index.get("format"))
    offset, size, digest = (index.get(f"manifest_{name}") for name in ("offset", "size", "sha256"))
    if not (isinstance(offset, int) and isinstance(size, int) and isinstance(digest, str)):
        raise members.damaged(path, writer.INDEX)
    if not (0 < offset < _LARGEST and 0 < size < _LARGEST) or start != writer.index_member(offset, size, digest):
        raise members.damaged(path, writer.INDEX)
    return index
