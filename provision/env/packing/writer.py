"""Write a bundle, as one file or as parts of equal size, under temporary names until it is complete."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from provision.env.bundle import layout, tar
from provision.env.bundle.layout import INDEX, INDEX_SIZE, MANIFEST, index_member, member_header
from provision.env.bundle.manifest import Chunk, Manifest, PrefixFiles
from provision.env.bundle.parse import LIMIT
from provision.env.packing import temporary
from provision.env.packing.chunks import Frame, PackedChunk
from provision.errors import BundleError

FLUSH = 64 << 20  # bytes that are written between two flushes to the disk

_BLOCK = 1 << 20
_DIGITS = 3  # of a part's number, at least


class Writer:
    """A bundle that is being written: members one after the other, and at the end the index into its place."""

    def __init__(self, output: Output, split: int) -> None:
        self._output = output
        self._split = split
        self._add_member(INDEX, bytes(INDEX_SIZE))

    @property
    def next_data(self) -> int:
        """The offset of the next member's data."""
        return self._output.size + tar.BLOCK

    def add_chunk(self, packed: PackedChunk, package: str) -> Chunk:
        """Write a chunk of a package."""
        offset, size = self.next_data, len(packed.data)
        chunk = Chunk(packed.digest, packed.key, packed.kind, package, packed.size, size, offset)
        self._add_member(chunk.member, packed.data)
        return chunk

    def add_prefix_files(self, blocks: Iterable[bytes]) -> PrefixFiles:
        """Write the member with the files that contain the prefix. ``blocks`` are its tar stream."""
        begin = self._output.size
        frame = Frame()
        self._output.write(member_header(PrefixFiles.member, 0))
        for block in blocks:
            self._output.write(frame.add(block))
        self._output.write(frame.finish())
        size = frame.compressed
        self._output.write(bytes(tar.padding(size)))
        self._output.patch(begin, member_header(PrefixFiles.member, size))
        return PrefixFiles(frame.digest, frame.size, size, begin + tar.BLOCK)

    def seal(self, manifest: Manifest) -> None:
        """Write the manifest and the end, then the index.

        Raises:
            BundleError: the manifest is larger than a reader accepts.
        """
        data = manifest.to_json()
        if len(data) > LIMIT:
            raise BundleError(
                f"the environment has {len(manifest.files)} files: their list has {len(data)} bytes, and the limit is"
                f" {LIMIT}",
                hint="exclude data with --exclude PATTERN, and upload it with: clusterctl push SRC DEST",
            )
        offset = self.next_data
        self._add_member(MANIFEST, data)
        self._output.write(tar.END)
        self._output.patch(0, index_member(offset, len(data), hashlib.sha256(data).hexdigest(), self._split))

    def _add_member(self, name: str, data: bytes | bytearray) -> None:
        self._output.write(member_header(name, len(data)))
        self._output.write(data)
        self._output.write(bytes(tar.padding(len(data))))


@contextmanager
def create_bundle(out: Path, *, split: int = 0) -> Iterator[Writer]:
    """Write a bundle that gets its name when it is complete, and is deleted otherwise.

    Args:
        out: the bundle.
        split: bytes of a part; 0 for one file.

    Raises:
        UsageError: the folder is not writable, or its disk is full.
    """
    with create_output(out, split=split) as output:
        yield Writer(output, split)


class Output:
    """The files of a bundle: a stream of bytes that is written at its end and patched in places.

    Args:
        out: the bundle.
        split: bytes of a part; 0 for one file.
    """

    def __init__(self, out: Path, *, split: int = 0) -> None:
        self.size = 0
        self._out = out
        self._split = split
        first, self._file = temporary.begin(out, ".0" if split else "")
        self._lock = os.dup(self._file.fileno())  # the first file is locked while this is open
        self._stem = first.name.removesuffix(".0") if split else first.name
        self._paths = [first]  # only the last part is open
        self._flusher = Flusher()

    @property
    def names(self) -> list[str]:
        """The final names of the files, in order."""
        if not self._split:
            return [self._out.name]
        digits = max(_DIGITS, len(str(len(self._paths) - 1)))
        return [f"{self._out.name}.{number:0{digits}}" for number in range(len(self._paths))]

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            room = self._room(len(view))
            self._file.write(view[:room])
            self.size += room
            view = view[room:]
        self._flusher.report(self._paths[-1], self.size)

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes."""
        self._file.flush()
        view = memoryview(data)
        while view:
            number, begin = divmod(offset, self._split) if self._split else (0, offset)
            room = self._split - begin if self._split else len(view)
            with self._paths[number].open("r+b") as file:
                file.seek(begin)
                file.write(view[:room])
            offset += len(view[:room])
            view = view[room:]

    def commit(self) -> None:
        """Give the files their names, and delete those of an older bundle of this name.

        One file replaces another in one rename. Parts cannot: the older bundle is deleted first, so that parts of two
        bundles are never mixed.
        """
        self._file.close()
        self._flusher.close()
        for path in self._paths:
            flush_file(path)
        older = layout.find_parts(self._out)
        listed = [layout.list_path(self._out)] if older or self._split else []
        if self._split:
            self._temporary(layout.LIST).write_bytes(self._checksums())
            flush_file(self._temporary(layout.LIST))
            _unlink(*listed, *older, self._out)
            self._temporary(layout.LIST).rename(*listed)
            for path, name in reversed([*zip(self._paths, self.names, strict=True)]):  # the locked file last
                path.rename(self._out.with_name(name))
        else:
            self._paths[0].replace(self._out)
            _unlink(*listed, *older)
        flush_file(self._out.parent)

    def close(self) -> None:
        """Delete the files that have no final name yet."""
        self._flusher.close()
        with suppress(OSError):  # its buffer may contain what the disk has no space for
            self._file.close()
        for path in (*self._paths, self._temporary(layout.LIST)):
            with suppress(OSError):
                path.unlink()
        os.close(self._lock)

    def _room(self, size: int) -> int:
        """How many of ``size`` bytes fit into the current file."""
        if not self._split:
            return size
        if self.size == self._split * len(self._paths):
            self._file.close()
            self._paths.append(self._temporary(f".{len(self._paths)}"))
            self._file = self._paths[-1].open("xb", buffering=_BLOCK)
        return min(size, self._split * len(self._paths) - self.size)

    def _temporary(self, suffix: str) -> Path:
        return self._out.with_name(self._stem + suffix)

    def _checksums(self) -> bytes:
        """The list of the parts' sha256, as ``sha256sum`` prints it."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return b"".join(map(layout.list_line, self.names, pool.map(layout.file_digest, self._paths)))


@contextmanager
def create_output(out: Path, *, split: int = 0) -> Iterator[Output]:
    """As ``create_bundle``, for the bare files."""
    with temporary.explain_errors(out):
        output = Output(out, split=split)
    try:
        with temporary.explain_errors(out):
            yield output
            output.commit()
    finally:
        output.close()


class Flusher:
    """Flushes a growing file to the disk in a thread, so that the end of the pack waits for little."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._flushed = 0

    def report(self, path: Path, size: int) -> None:
        """Report the size of the file, or of all parts together, and flush if it grew enough."""
        if size - self._flushed >= FLUSH:
            self._flushed = size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._paths.put(path)

    def close(self) -> None:
        """Stop the thread."""
        if self._thread:
            self._paths.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while path := self._paths.get():
            with suppress(OSError):  # ``commit`` flushes again and reports the error
                flush_file(path)


def is_inside(out: Path, folder: Path) -> bool:
    """Whether the file ``out`` is or would be inside a folder."""
    return Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder))


def flush_file(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
