"""Unpack a tar archive that nobody vouches for into a new folder.

A member goes where its name says, or the archive is refused: no absolute names, no ``..``, nothing through a symlink,
no hard link to what is not in the archive, no devices. Symlinks themselves may point anywhere: they are not followed.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, NoReturn, cast

import zstandard

from provision.env.packing import temporary
from provision.errors import BundleError, UsageError
from provision.model import Emit, Progress

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
_DAMAGE = (EOFError, ValueError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError)


def format_of(path: Path) -> Format | None:
    """What kind of archive a file is, by its first bytes; None for none that is known.

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
class Unpacked:
    """What lies in a folder now.

    Attributes:
        folder: the folder.
        kinds: every path relative to it, and what is there.
        modes: the permissions of folders; they are given by ``seal``, since some would refuse what comes after.
    """

    folder: Path
    kinds: dict[str, Kind] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)

    def seal(self) -> None:
        """Give every folder its permissions."""
        for path, mode in sorted(self.modes.items(), reverse=True):
            (self.folder / path).chmod(mode)


def unpack(archive: Path, folder: Path, *, stage: str, emit: Emit) -> Unpacked:
    """Unpack ``archive`` into the empty folder ``folder``.

    Args:
        archive: a tar, plain or compressed.
        folder: where nobody else writes.
        stage: what progress is reported as, in bytes of the archive.
        emit: told about the progress.

    Raises:
        BundleError: it is no tar, damaged, truncated, or a member would leave the folder.
        UsageError: it cannot be read.
    """
    unpacking = _Unpacking(archive, Unpacked(folder))
    total = archive.stat().st_size
    said = 0
    with _opened(archive) as (raw, stream):
        try:
            with tarfile.open(
                fileobj=cast("IO[bytes]", stream), mode="r|", bufsize=_BLOCK, encoding="utf-8", errors="surrogateescape"
            ) as tar:
                for member in tar:
                    unpacking.add(member, lambda member=member: tar.extractfile(member))  # type: ignore[misc]
                    tar.members.clear()  # type: ignore[attr-defined] # else it keeps all of them
                    if raw.tell() >= said + _BLOCK:
                        said = raw.tell()
                        emit(Progress(stage, said, total))
                stream.check_end(tar.offset)
        except _DAMAGE as error:
            raise BundleError(f"{archive} is damaged: {error}", hint="copy it again") from error
        except OSError as error:
            if error.errno in temporary.FULL:
                raise
            if error.errno is None:  # bz2's word for damage
                raise BundleError(f"{archive} is damaged: {error}", hint="copy it again") from error
            raise UsageError(f"cannot unpack {archive}: {error.strerror}") from error
    return unpacking.unpacked


class _Unpacking:
    """Members, one after the other."""

    def __init__(self, archive: Path, unpacked: Unpacked) -> None:
        self._archive = archive
        self.unpacked = unpacked
        self._kinds = unpacked.kinds
        self._top = str(unpacked.folder)

    def add(self, member: tarfile.TarInfo, content: Callable[[], IO[bytes] | None]) -> None:
        """Make what a member describes.

        Raises:
            BundleError: it would leave the folder, or is a device.
        """
        path = self._path(member, member.name)
        if not path and member.isdir():
            return
        if not path:
            self._refuse(member, "has no name")
        self._make_parents(member, path)
        mode = stat.S_IMODE(member.mode) & 0o777
        if member.isdir():
            self._make_folder(member, path)
            self.unpacked.modes[path] = mode | stat.S_IRUSR | stat.S_IXUSR
            return
        self._make_room(member, path)
        if member.isreg():
            self._write(path, content(), mode | stat.S_IRUSR, _time(member))
        elif member.issym():
            os.symlink(member.linkname, self._full(path))  # noqa: PTH211
            os.utime(self._full(path), ns=(_time(member), _time(member)), follow_symlinks=False)
            self._kinds[path] = "link"
        elif member.islnk():
            target = self._path(member, member.linkname)
            if self._kinds.get(target) not in ("file", "link"):
                self._refuse(member, f"is a hard link to {member.linkname!r}, which is no file before it")
            os.link(self._full(target), self._full(path), follow_symlinks=False)
            self._kinds[path] = self._kinds[target]
        else:
            self._refuse(member, "is a device or a pipe")

    def _path(self, member: tarfile.TarInfo, name: str) -> str:
        """A name as a plain relative path; empty for the top folder."""
        if name.startswith("/"):
            self._refuse(member, "has an absolute path" if name == member.name else f"is a link to {name!r}")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            self._refuse(member, "leads out of the folder" if name == member.name else f"is a link to {name!r}")
        return "/".join(parts)

    def _make_parents(self, member: tarfile.TarInfo, path: str) -> None:
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

    def _make_folder(self, member: tarfile.TarInfo, path: str) -> None:
        if self._kinds.get(path, "dir") != "dir":
            self._refuse(member, "is a folder where another member is none")
        if path not in self._kinds:
            Path(self._full(path)).mkdir(mode=0o755)
            self._kinds[path] = "dir"

    def _make_room(self, member: tarfile.TarInfo, path: str) -> None:
        """The last member of a name is the one that counts, as with every tar."""
        kind = self._kinds.pop(path, None)
        if kind == "dir":
            self._refuse(member, "is no folder where another member is one")
        if kind is not None:
            Path(self._full(path)).unlink()

    def _write(self, path: str, content: IO[bytes] | None, mode: int, time: int) -> None:
        assert content is not None
        full = self._full(path)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor is no path
            while block := content.read(_BLOCK):
                file.write(block)
            os.fchmod(descriptor, mode)
            os.utime(descriptor, ns=(time, time))
        self._kinds[path] = "file"

    def _full(self, path: str) -> str:
        return f"{self._top}/{path}"

    def _refuse(self, member: tarfile.TarInfo, why: str) -> NoReturn:
        raise BundleError(
            f"{self._archive}: the member {member.name!r} {why}; nothing of the archive is used",
            hint="ask whoever made it: no tool writes such a member into an environment's archive",
        )


def _time(member: tarfile.TarInfo) -> int:
    """When it was changed, in nanoseconds."""
    time = max(0.0, min(member.mtime, _LATEST))
    return int(time) * 1_000_000_000 + int(time % 1 * 1_000_000_000)


class _Stream:
    """The plain bytes of an archive, and where they hold anything but zeros last."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._position = 0
        self._last = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        held = len(data.rstrip(b"\0"))
        if held:
            self._last = self._position + held
        self._position += len(data)
        return data

    def check_end(self, offset: int) -> None:
        """Read to the end, which must be zero blocks from ``offset``: tarfile also ends where a header is damaged.

        Raises:
            EOFError: it is truncated.
            ValueError: something else follows the last member.
        """
        while self.read(_BLOCK):
            pass
        if self._last > offset:
            raise ValueError(f"no member begins at byte {offset} of its tar stream, and it goes on")
        if self._position < offset + 512:
            raise EOFError(f"its tar stream ends at byte {self._position}, in the middle")


@contextmanager
def _opened(archive: Path) -> Iterator[tuple[IO[bytes], _Stream]]:
    """The file, and the plain bytes in it."""
    with archive.open("rb") as raw:
        yield raw, _Stream(cast("IO[bytes]", _plain(raw, format_of(archive))))


def _plain(raw: IO[bytes], kind: Format | None) -> object:
    if kind == "gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if kind == "zst":
        return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return lzma.LZMAFile(raw)
    return raw
