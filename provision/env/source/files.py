"""The files of an environment: list them without opening any, and read them.

Reading detects files that changed since they were listed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from provision.env.bundle.manifest import Entry, EntryType, Mark
from provision.errors import BundleError, ClusterctlError, UsageError

FOLDER_MTIME = 315532800  # 1980-01-01: every pip install changes a folder's own mtime, which means nothing

# At the top of a prefix: clusterctl's folder on a node, and conda's own stores in a base environment.
_NOT_PACKED = frozenset({".clusterctl", "pkgs", "envs", "conda-bld"})

_PERMISSIONS = 0o777  # an environment needs no setuid, setgid or sticky bits

Skip = Callable[[str, str], bool]
"""Receives a path relative to the top of a walk and its last name. True: skip the path and everything below it."""


class Source(NamedTuple):
    """A file, link or folder to pack.

    Attributes:
        path: where it goes, relative to the prefix.
        file: where it is on this machine.
        type: ``file``, ``link``, ``hard`` or ``dir``.
        mode: its permissions.
        mtime_ns: its mtime in nanoseconds.
        size: bytes of a file.
        target: of a link.
        inode: device and inode number of a file with several names, else None.
    """

    path: str
    file: str
    type: EntryType
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""
    inode: tuple[int, int] | None = None

    @property
    def mtime(self) -> int:
        """Whole seconds, as in tar headers and .pyc files."""
        return seconds(self.mtime_ns)

    def entry(self, digest: str, *, chunks: tuple[int, ...] = (), marks: tuple[Mark, ...] = ()) -> Entry:
        """What the manifest says of it."""
        return Entry(self.path, self.type, self.mode, self.mtime, self.size, digest, self.target, chunks, marks=marks)


def seconds(mtime_ns: int) -> int:
    """Whole seconds of a time in nanoseconds; 0 for a time before 1970."""
    return mtime_ns // 1_000_000_000 if mtime_ns > 0 else 0


@dataclass(frozen=True)
class Tree:
    """The result of a walk.

    Attributes:
        sources: files, links and folders, sorted by path.
        skipped: the paths of sockets, pipes and devices.
        folders: the mtime in nanoseconds of each folder. It changes when a name in the folder is added or removed.
    """

    sources: tuple[Source, ...]
    skipped: tuple[str, ...] = ()
    folders: Mapping[str, int] = field(default_factory=dict)


def walk_environment(prefix: Path) -> Tree:
    """Walk an environment; errors as for ``walk``."""
    return walk(prefix, "", skip=lambda path, _name: path in _NOT_PACKED)


def walk(top: Path, to: str, *, skip: Skip) -> Tree:
    """Walk the folder ``top``, or take the single file ``top``. Symlinks in it are not followed.

    Args:
        top: the folder.
        to: where it goes, relative to the prefix; empty for the prefix itself.
        skip: which paths to skip.

    Raises:
        UsageError: a folder cannot be read.
        BundleError: a folder was deleted during the walk.
    """
    status = top.stat()
    sources: list[Source] = [_source(to, str(top), status)] if to else []
    skipped: list[str] = []
    mtimes: dict[str, int] = {str(top): status.st_mtime_ns}
    folders = [("", str(top))] if stat.S_ISDIR(status.st_mode) else []
    while folders:
        relative, folder = folders.pop()
        for name, status in list_folder(folder):
            path = f"{relative}/{name}" if relative else name
            if skip(path, name):
                continue
            target, file = f"{to}/{path}" if to else path, f"{folder}/{name}"
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFDIR:
                folders.append((path, file))
                mtimes[file] = status.st_mtime_ns
            if kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                sources.append(_source(target, file, status))
            else:
                skipped.append(target)
    return Tree(tuple(sorted(sources)), tuple(sorted(skipped)), mtimes)


def pick(top: Path, to: str, paths: Iterable[str]) -> Tree:
    """Take only ``paths`` (relative to ``top``) and the folders above them. Paths that do not exist are ignored.

    A path below a symlink does not exist: git still lists it after a folder was replaced by a link.
    """
    wanted = {to: str(top)}
    for path in paths:
        if os.path.lexists(top / path):
            for part in (path, *parents(path)):
                wanted[f"{to}/{part}"] = str(top / part)
    sources: list[Source] = []
    folders = {to.rpartition("/")[0]}
    for target, file in sorted(wanted.items()):  # a folder comes before its contents
        if target.rpartition("/")[0] in folders:
            sources.append(_source(target, file, os.lstat(file)))
            if sources[-1].type == "dir":
                folders.add(target)
    return Tree(tuple(sources))


def parents(path: str) -> Iterator[str]:
    """The folders above a relative path, the nearest first."""
    while path := path.rpartition("/")[0]:
        yield path


def list_folder(folder: str) -> list[tuple[str, os.stat_result]]:
    """The names in a folder with their status, read through a descriptor to resolve the folder's path only once.

    Raises:
        UsageError: the folder cannot be read.
        BundleError: it no longer exists.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(descriptor) as items:
                return [(item.name, item.stat(follow_symlinks=False)) for item in items]
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise folder_changed(folder) from error
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {(error.strerror or str(error)).lower()}") from error


def folder_changed(folder: str) -> BundleError:
    """The error for a folder that changed during packing."""
    return BundleError(
        f"{folder} changed while it was read: a file in it was added or removed",
        hint="stop what writes to it, then run the same command again",
    )


def _source(path: str, file: str, status: os.stat_result) -> Source:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return Source(path, file, "dir", mode & _PERMISSIONS, FOLDER_MTIME * 1_000_000_000)
    if stat.S_ISLNK(mode):
        return Source(path, file, "link", 0o777, status.st_mtime_ns, 0, os.readlink(file))  # noqa: PTH115
    inode = (status.st_dev, status.st_ino) if status.st_nlink > 1 else None
    return Source(path, file, "file", mode & _PERMISSIONS, status.st_mtime_ns, status.st_size, "", inode)


_BLOCK = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_source(source: Source) -> Iterator[int]:
    """Open a file and yield its descriptor. At the end, compare its size and mtime with the survey's.

    Raises:
        BundleError: the file changed or was deleted.
        UsageError: it cannot be read.
    """
    descriptor = _open(source)
    try:
        yield descriptor
        _check_unchanged(descriptor, source)
    finally:
        os.close(descriptor)


def read_into(view: memoryview, source: Source) -> None:
    """Read a whole file into ``view``, which has its size; errors as for ``open_source``."""
    descriptor = _open(source)  # not ``open_source``: a generator for each of many small files takes time
    try:
        if view:
            fill(view, descriptor, 0, source)
        _check_unchanged(descriptor, source)
    finally:
        os.close(descriptor)


def fill(view: memoryview, descriptor: int, offset: int, source: Source) -> None:
    """Fill ``view`` with a file's bytes from ``offset``.

    Raises:
        BundleError: the file became shorter.
        UsageError: it cannot be read.
    """
    size = len(view)
    done = 0
    try:
        while done < size:
            count = os.preadv(descriptor, [view[done:] if done else view], offset + done)
            if not count:
                raise source_changed(source)
            done += count
    except OSError as error:
        if error.errno in (errno.ESPIPE, errno.EISDIR):  # it was replaced by a pipe or a folder
            raise source_changed(source) from error
        raise UsageError(f"cannot read {source.file}: {error.strerror}") from error


def read_at(descriptor: int, offset: int, size: int, source: Source) -> bytes:
    """Read exactly ``size`` bytes from ``offset``; errors as for ``fill``."""
    data = bytearray(max(0, size))
    with memoryview(data) as view:
        fill(view, descriptor, offset, source)
    return bytes(data)


def read_again(source: Source, digest: str) -> Iterator[bytes]:
    """Read a file whose sha256 is known in blocks; errors as for ``open_source``."""
    now = hashlib.sha256()
    with open_source(source) as descriptor:
        for offset in range(0, source.size, _BLOCK):
            block = read_at(descriptor, offset, min(_BLOCK, source.size - offset), source)
            now.update(block)
            yield block
    if now.hexdigest() != digest:
        raise source_changed(source)


def source_changed(source: Source) -> BundleError:
    """The error for a file that changed since the survey."""
    return BundleError(
        f"{source.file} changed while it was read", hint="stop what writes to it, then run the same command again"
    )


def _open(source: Source) -> int:
    try:
        return os.open(source.file, _FLAGS)
    except OSError as error:
        raise _failure(source, error) from error


def _check_unchanged(descriptor: int, source: Source) -> None:
    status = os.fstat(descriptor)
    if status.st_mtime_ns != source.mtime_ns or status.st_size != source.size:
        raise source_changed(source)


def _failure(source: Source, error: OSError) -> ClusterctlError:
    if isinstance(error, PermissionError):
        return UsageError(
            f"cannot read {source.file}: permission denied",
            hint="ask its owner for read permission, or pack as a user who has it",
        )
    return source_changed(source)
