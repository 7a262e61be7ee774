"""Unpack an untrusted tar archive into a new folder.

An archive is refused if it has an absolute name, a ``..``, a path through a symlink, a hard link to a file that is not
in the archive, or a device. Symlinks may point anywhere: they are not followed.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, NoReturn, Protocol

import zstandard

from provision.env.bundle.parse import LONGEST_NAME
from provision.env.bundle.reader import WINDOW
from provision.env.bundle.tar import Member, TarError, TarLimitError, TarReader
from provision.env.packing import temporary
from provision.errors import BundleError, UsageError

Kind = Literal["file", "link", "dir"]
Format = Literal["tar", "gz", "zst", "bz2", "xz", "zip", "squashfs"]

_BLOCK = 1 << 20
_LATEST = float(1 << 33)  # seconds; in the year 2242
_MAGIC: tuple[tuple[bytes, Format], ...] = (
    (b"\x1f\x8b", "gz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip"),
    (b"hsqs", "squashfs"),
)
_XZ = 256 << 20  # bytes of memory for xz, which needs 65 MiB for what `xz -9` writes
_DAMAGE = (EOFError, TarError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)
_TOO_LARGE = {"Frame requires too much memory": WINDOW, "Memory usage limit": _XZ}  # the libraries' messages


def format_of(path: Path) -> Format | None:
    """The kind of an archive, from its first bytes; None if unknown.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    found = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    return found or ("tar" if head[257:262] == b"ustar" else None)


@dataclass
class UnpackedArchive:
    """An unpacked archive.

    Attributes:
        folder: the folder.
        kinds: the kind of every path, relative to the folder.
        modes: permissions of folders. ``seal`` sets them, since some prevent writing.
    """

    folder: Path
    kinds: dict[str, Kind] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)

    def seal(self) -> None:
        """Set the permissions of every folder."""
        for path, mode in sorted(self.modes.items(), reverse=True):
            (self.folder / path).chmod(mode)


def unpack(archive: Path, folder: Path, progress: Callable[[int], None]) -> UnpackedArchive:
    """Unpack ``archive`` into the empty folder ``folder``.

    Args:
        archive: a tar, uncompressed or compressed.
        folder: a folder that no other process writes to.
        progress: receives the number of bytes of the archive that were read.

    Raises:
        BundleError: it is not a tar, damaged, over a limit, or a member would leave the folder.
        UsageError: it cannot be read, or does not fit on the disk.
    """
    unpacking = _Unpacking(archive, UnpackedArchive(folder))
    reported = 0
    with _open_archive(archive) as (raw, stream):
        try:
            tar = TarReader(stream.read)
            for member in tar:
                unpacking.add(member, tar.content())
                if raw.tell() >= reported + _BLOCK:
                    reported = raw.tell()
                    progress(reported)
        except TarLimitError as error:
            raise BundleError(f"{archive} cannot be used: {error}", hint="create the archive again") from error
        except _DAMAGE as error:
            for words, limit in _TOO_LARGE.items():
                if words in str(error):
                    raise BundleError(
                        f"{archive} needs more than {limit >> 20} MiB of memory to unpack, the limit",
                        hint="compress it again with gzip, or zstd without --ultra and --long",
                    ) from error
            raise BundleError(f"{archive} is damaged: {error}", hint="copy it again") from error
        except OSError as error:
            if error.errno in temporary.FULL:
                raise
            if error.errno is None:  # bz2 reports damage like this
                raise BundleError(f"{archive} is damaged: {error}", hint="copy it again") from error
            raise UsageError(f"cannot unpack {archive}: {error.strerror}") from error
    return unpacking.unpacked


class _Unpacking:
    """Creates members one after the other."""

    def __init__(self, archive: Path, unpacked: UnpackedArchive) -> None:
        self._archive = archive
        self.unpacked = unpacked
        self._kinds = unpacked.kinds
        self._top = str(unpacked.folder)

    def add(self, member: Member, content: Iterable[bytes]) -> None:
        """Create a member.

        Raises:
            BundleError: it would leave the folder, or is a device.
        """
        path = self._path(member, member.name)
        if not path and member.kind == "dir":
            return
        if not path:
            self._refuse(member, "has no name")
        self._make_parents(member, path)
        mode = member.mode & 0o777
        if member.kind == "dir":
            self._make_folder(member, path)
            self.unpacked.modes[path] = mode | 0o500
            return
        self._delete_earlier(member, path)
        if member.kind == "file":
            self._check_space(member)
            self._write(path, content, mode | 0o400, _time(member))
        elif member.kind == "link":
            if not member.target or "\0" in member.target:
                self._refuse(member, "is a symlink to no path")
            os.symlink(member.target, self._full(path))  # noqa: PTH211
            os.utime(self._full(path), ns=(_time(member), _time(member)), follow_symlinks=False)
            self._kinds[path] = "link"
        elif member.kind == "hard":
            target = self._path(member, member.target)
            if self._kinds.get(target) not in ("file", "link"):
                self._refuse(member, f"is a hard link to {member.target!r}, which is not a file before it")
            os.link(self._full(target), self._full(path), follow_symlinks=False)
            self._kinds[path] = self._kinds[target]
        else:
            self._refuse(member, "is a device or a pipe")

    def _path(self, member: Member, name: str) -> str:
        """A name as a normalized relative path; empty for the top folder."""
        if name.startswith("/"):
            self._refuse(member, "has an absolute path" if name == member.name else f"is a link to {name!r}")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            self._refuse(member, f"has a name of more than {LONGEST_NAME} bytes")
        if ".." in parts or "\0" in name:
            self._refuse(member, "leads out of the folder" if name == member.name else f"is a link to {name!r}")
        return "/".join(parts)

    def _make_parents(self, member: Member, path: str) -> None:
        at = path.find("/")
        while at > 0:
            folder = path[:at]
            kind = self._kinds.get(folder)
            if kind is None:
                Path(self._full(folder)).mkdir(mode=0o755)
                self._kinds[folder] = "dir"
            elif kind != "dir":
                what = "the symlink" if kind == "link" else "the file"
                self._refuse(member, f"goes through {what} {folder!r}")
            at = path.find("/", at + 1)

    def _make_folder(self, member: Member, path: str) -> None:
        if self._kinds.get(path, "dir") != "dir":
            self._refuse(member, "is a folder, and another member with its path is not")
        if path not in self._kinds:
            Path(self._full(path)).mkdir(mode=0o755)
            self._kinds[path] = "dir"

    def _delete_earlier(self, member: Member, path: str) -> None:
        """Delete an earlier member with the same path: the last one counts, as in every tar."""
        kind = self._kinds.pop(path, None)
        if kind == "dir":
            self._refuse(member, "is not a folder, and another member with its path is one")
        if kind is not None:
            Path(self._full(path)).unlink()

    def _check_space(self, member: Member) -> None:
        """Refuse a file that does not fit before the disk is full."""
        if member.size > _BLOCK:
            status = os.statvfs(self._top)
            free = status.f_bavail * status.f_frsize
            if member.size > free:
                raise UsageError(
                    f"no space left to unpack {self._archive}: its member {member.name[:200]!r} has"
                    f" {member.size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {self.unpacked.folder.parent}",
                    hint="free some space, or move the archive to another disk",
                )

    def _write(self, path: str, content: Iterable[bytes], mode: int, time: int) -> None:
        full = self._full(path)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor is no path
            for block in content:
                view = memoryview(block)
                while view:
                    view = view[file.write(view) :]
            os.fchmod(descriptor, mode)
            os.utime(descriptor, ns=(time, time))
        self._kinds[path] = "file"

    def _full(self, path: str) -> str:
        return f"{self._top}/{path}"

    def _refuse(self, member: Member, why: str) -> NoReturn:
        raise BundleError(
            f"{self._archive}: the member {member.name[:200]!r} {why}; the archive is not used",
            hint="do not trust it: no tool writes such a member to an environment's archive",
        )


def _time(member: Member) -> int:
    """The mtime in nanoseconds."""
    time = max(0.0, min(member.mtime, _LATEST))
    return int(time) * 1_000_000_000 + int(time % 1 * 1_000_000_000)


@contextmanager
def _open_archive(archive: Path) -> Iterator[tuple[IO[bytes], _Reader]]:
    """The file, and a reader of its uncompressed bytes."""
    with archive.open("rb") as raw:
        yield raw, _plain(raw, format_of(archive))


class _Reader(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


def _plain(raw: IO[bytes], kind: Format | None) -> _Reader:
    if kind == "gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if kind == "zst":
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        return decompressor.stream_reader(raw, read_across_frames=True, closefd=False)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return _Xz(raw)
    return raw


class _Xz:
    """Reads the streams of an xz file in bounded memory, which ``lzma.LZMAFile`` cannot."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ)
        self._rest = b""

    def read(self, size: int = -1, /) -> bytes:
        while True:
            if self._stream.eof:
                self._rest = (self._stream.unused_data or self._rest).lstrip(b"\0")  # padding
                if not self._rest:
                    self._rest = self._raw.read(_BLOCK).lstrip(b"\0")
                    if not self._rest:
                        return b""
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ)
            data = self._rest
            self._rest = b""
            if self._stream.needs_input and not data:
                data = self._raw.read(_BLOCK)
                if not data:
                    raise EOFError("its xz stream ends in the middle")
            if plain := self._stream.decompress(data, size):
                return plain
