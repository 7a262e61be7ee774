"""The files that a bundle is written to, under temporary names until it is whole: one, or slices of one length."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from provision.env.bundle import slices
from provision.env.packing import temporary

_BLOCK = 1 << 20
_FLUSH = 64 << 20  # bytes that may lie in memory only
_DIGITS = 3  # of a slice's number, at least


Piece = tuple[str, int, int]
"""A place for bytes: a file, an offset in it, and a length."""


class Output:
    """One stream of bytes that is written at its end, and patched in places.

    Args:
        out: the bundle.
        split: bytes of a slice; 0 for one file.
    """

    def __init__(self, out: Path, *, split: int = 0) -> None:
        self.size = 0
        self._out = out
        self._split = split
        first, self._file = temporary.begin(out, ".0" if split else "")
        self._lock = os.dup(self._file.fileno())  # so long as this is open, the first one is locked
        self._stem = first.name.removesuffix(".0") if split else first.name
        self._paths = [first]  # of many slices only the last one is open
        self._flusher = Flusher()

    @property
    def names(self) -> list[str]:
        """The files' names, in order, once the bundle is whole."""
        if not self._split:
            return [self._out.name]
        digits = max(_DIGITS, len(str(len(self._paths) - 1)))
        return [f"{self._out.name}.{number:0{digits}}" for number in range(len(self._paths))]

    def write(self, data: bytes) -> None:
        """Add bytes."""
        view = memoryview(data)
        while view:
            room = self._room(len(view))
            self._file.write(view[:room])
            self.size += len(view[:room])
            view = view[room:]

    def reserve(self, size: int) -> list[Piece]:
        """Leave room for bytes that somebody else writes: where it is."""
        pieces = []
        while size:
            room = self._room(size)
            pieces.append((str(self._paths[-1]), self._file.tell(), room))
            self._file.seek(room, os.SEEK_CUR)
            self.size += room
            size -= room
        self._flusher.tell(self._paths[-1], self.size)
        return pieces

    def patch(self, offset: int, data: bytes) -> None:
        """Write bytes in the place of others."""
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
        """Give the files their names, and remove those of an older bundle of this name.

        One file takes the place of another in one step. Slices cannot: the older bundle goes first, so that slices of
        two bundles never lie beside each other.
        """
        self._file.close()
        self._flusher.close()
        for path in self._paths:
            _sync(path)
        older = slices.slices_of(self._out)
        listed = [slices.list_of(self._out)] if older or self._split else []
        if self._split:
            self._temporary(slices.LIST).write_bytes(self._list())
            _sync(self._temporary(slices.LIST))
            _remove(*listed, *older, self._out)
            self._temporary(slices.LIST).rename(*listed)
            for path, name in reversed([*zip(self._paths, self.names, strict=True)]):  # the locked one comes last
                path.rename(self._out.with_name(name))
        else:
            self._paths[0].replace(self._out)
            _remove(*listed, *older)
        _sync(self._out.parent)

    def close(self) -> None:
        """Remove what has not got its name."""
        self._flusher.close()
        with suppress(OSError):  # what its buffer holds may be what the disk has no room for
            self._file.close()
        for path in (*self._paths, self._temporary(slices.LIST)):
            with suppress(OSError):
                path.unlink()
        os.close(self._lock)

    def _room(self, size: int) -> int:
        """The bytes that the last file may still take, of ``size`` that are wanted."""
        if not self._split:
            return size
        if self.size == self._split * len(self._paths):
            self._file.close()
            self._paths.append(self._temporary(f".{len(self._paths)}"))
            self._file = self._paths[-1].open("xb", buffering=_BLOCK)
        return min(size, self._split * len(self._paths) - self.size)

    def _temporary(self, suffix: str) -> Path:
        return self._out.with_name(self._stem + suffix)

    def _list(self) -> bytes:
        """What ``sha256sum`` would print of the slices; only now are they what they stay."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return b"".join(map(slices.list_line, self.names, pool.map(_digest, self._paths)))


class Flusher:
    """Has a file written to the disk while it grows, so that not all of it is left to wait for at the end."""

    def __init__(self) -> None:
        self._sizes: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._told = 0

    def tell(self, path: Path, size: int) -> None:
        """Say how large the file, or all slices together, have become."""
        if size - self._told >= _FLUSH:
            self._told = size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._sizes.put(path)

    def close(self) -> None:
        """Do no more."""
        if self._thread:
            self._sizes.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while path := self._sizes.get():
            with suppress(OSError):  # at the end it is noticed
                _sync(path)


def place(data: bytes, pieces: Iterable[Piece]) -> None:
    """Write bytes to where room was left for them.

    Raises:
        OSError: the disk does not take them.
    """
    view = memoryview(data)
    for path, offset, size in pieces:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            end = offset + size
            at = offset
            while at < end:
                count = os.pwrite(descriptor, view[: end - at], at)
                at += count
                view = view[count:]
        finally:
            os.close(descriptor)


@contextmanager
def created(out: Path, *, split: int = 0) -> Iterator[Output]:
    """Write a bundle that appears under its name only when it is whole; nothing stays behind otherwise.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    with temporary.explained(out):
        output = Output(out, split=split)
    try:
        with temporary.explained(out):
            yield output
            output.commit()
    finally:
        output.close()


def lies_in(out: Path, folder: Path) -> bool:
    """Whether what is written as ``out`` would lie in a folder."""
    return Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder))


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
