"""Walk an environment: what is there, before anything is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from provision.env.bundle.manifest import EntryType
from provision.errors import BundleError, UsageError

FOLDER_MTIME = 315532800  # 1980-01-01: a folder's own time says nothing, and changes with every pip install

# At the top of an environment: ours on a node, and conda's own stores in a base environment.
_NOT_PACKED = frozenset({".clusterctl", "pkgs", "envs", "conda-bld"})

_PERMISSIONS = 0o777  # an environment needs neither setuid nor setgid nor sticky bits


LeaveOut = Callable[[str, str], bool]
"""Told a path relative to the top of a walk and its last name: whether to leave it out."""


class Found(NamedTuple):
    """Something in the environment: ``path`` is where it goes, relative to the prefix; ``source`` where it lies."""

    path: str
    source: str
    type: EntryType
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""
    inode: tuple[int, int] | None = None  # device and number of a file that has more names than this one

    @property
    def mtime(self) -> int:
        """Whole seconds, as tar and .pyc files have it."""
        return seconds(self.mtime_ns)


def seconds(mtime_ns: int) -> int:
    """Whole seconds of a time in nanoseconds; none before 1970."""
    return mtime_ns // 1_000_000_000 if mtime_ns > 0 else 0


@dataclass(frozen=True)
class Tree:
    """The result of a walk.

    Attributes:
        found: what was found, sorted by path.
        skipped: the paths of sockets and the like.
        folders: every folder that was looked into, and its mtime in nanoseconds: it changes when a name in it comes or
            goes.
    """

    found: tuple[Found, ...]
    skipped: tuple[str, ...] = ()
    folders: Mapping[str, int] = field(default_factory=dict)


def environment(prefix: Path, *, on_file: Callable[[Found], None] | None = None) -> Tree:
    """Walk an environment; arguments and errors as for ``walk``."""
    return walk(prefix, "", leave_out=lambda path, _name: path in _NOT_PACKED, on_file=on_file)


def walk(top: Path, to: str, *, leave_out: LeaveOut, on_file: Callable[[Found], None] | None = None) -> Tree:
    """Walk the folder ``top``, or look at the file ``top``; symlinks in it are not followed.

    Args:
        top: the folder.
        to: where it goes, relative to the prefix; empty for the prefix itself.
        leave_out: told the path relative to ``top`` and the name; what it says yes to is not entered.
        on_file: told of every file as soon as it is found.

    Raises:
        UsageError: a folder cannot be read.
        BundleError: a folder vanished.
    """
    first = top.stat()
    found: list[Found] = [_look(to, str(top), first)] if to else []
    skipped: list[str] = []
    seen: dict[str, int] = {str(top): first.st_mtime_ns}
    folders = [("", str(top))] if stat.S_ISDIR(first.st_mode) else []
    while folders:
        relative, folder = folders.pop()
        for name, status in _inside(folder):
            path = f"{relative}/{name}" if relative else name
            if leave_out(path, name):
                continue
            goes_to, source = f"{to}/{path}" if to else path, f"{folder}/{name}"
            kind = stat.S_IFMT(status.st_mode)
            if kind == stat.S_IFDIR:
                folders.append((path, source))
                seen[source] = status.st_mtime_ns
            if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
                skipped.append(goes_to)
                continue
            found.append(_look(goes_to, source, status))
            if on_file and kind == stat.S_IFREG:
                on_file(found[-1])
    return Tree(tuple(sorted(found)), tuple(sorted(skipped)), seen)


def pick(top: Path, to: str, paths: Iterable[str]) -> Tree:
    """Take only ``paths`` (relative to ``top``) and the folders above them; those that do not exist are passed over.

    What lies beneath a symlink does not exist: git goes on naming it when a folder was replaced by one.
    """
    wanted = {to: str(top)}
    for path in paths:
        if not os.path.lexists(top / path):
            continue
        for part in (path, *_above(path)):
            wanted[f"{to}/{part}"] = str(top / part)
    found: list[Found] = []
    folders = {to.rpartition("/")[0]}
    for goes_to, source in sorted(wanted.items()):  # a folder comes before what lies in it
        if goes_to.rpartition("/")[0] in folders:
            found.append(_look(goes_to, source, os.lstat(source)))
            if found[-1].type == "dir":
                folders.add(goes_to)
    return Tree(tuple(found))


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _look(path: str, source: str, status: os.stat_result) -> Found:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return Found(path, source, "dir", mode & _PERMISSIONS, FOLDER_MTIME * 1_000_000_000)
    if stat.S_ISLNK(mode):
        return Found(path, source, "link", 0o777, status.st_mtime_ns, 0, os.readlink(source))  # noqa: PTH115
    inode = (status.st_dev, status.st_ino) if status.st_nlink > 1 else None
    return Found(path, source, "file", mode & _PERMISSIONS, status.st_mtime_ns, status.st_size, "", inode)


def _inside(folder: str) -> list[tuple[str, os.stat_result]]:
    """The names in a folder, and what they are; through a descriptor, so that their paths need not be walked again."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with os.scandir(descriptor) as items:
                return [(item.name, item.stat(follow_symlinks=False)) for item in items]
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise changed(folder) from error
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {(error.strerror or str(error)).lower()}") from error


def changed(folder: str) -> BundleError:
    """The error for a folder that is not what it was."""
    return BundleError(
        f"{folder} changed while it was packed: something in it was added or removed",
        hint="pack again when nothing writes to it",
    )
