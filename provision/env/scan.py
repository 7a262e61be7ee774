"""Walk an environment: what is there, before anything is read."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from provision.env.manifest import EntryType
from provision.errors import UsageError

FOLDER_MTIME = 315532800  # 1980-01-01: a folder's own time says nothing, and changes with every pip install

# At the top of an environment: ours on a node, and conda's own stores in a base environment.
_NOT_PACKED = frozenset({".clusterctl", "pkgs", "envs", "conda-bld"})

_PERMISSIONS = 0o777  # an environment needs neither setuid nor setgid nor sticky bits


class Found(NamedTuple):
    """Something in the environment: ``path`` is where it goes, relative to the prefix; ``source`` where it lies."""

    path: str
    source: str
    type: EntryType
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""

    @property
    def mtime(self) -> int:
        """Whole seconds, as tar and .pyc files have it."""
        return max(0, self.mtime_ns // 1_000_000_000)


@dataclass(frozen=True)
class Tree:
    """The result of a walk: what was found, sorted by path, and the paths of sockets and the like."""

    found: tuple[Found, ...]
    skipped: tuple[str, ...] = ()


def environment(prefix: Path) -> Tree:
    """Walk an environment.

    Raises:
        UsageError: a folder cannot be read.
    """
    return walk(prefix, "", leave_out=lambda path, _name: path in _NOT_PACKED)


def walk(top: Path, to: str, *, leave_out: Callable[[str, str], bool]) -> Tree:
    """Walk the folder ``top``; symlinks are not followed.

    Args:
        top: the folder.
        to: where it goes, relative to the prefix; empty for the prefix itself.
        leave_out: told the path relative to ``top`` and the name; what it says yes to is not entered.

    Raises:
        UsageError: a folder cannot be read.
    """
    found: list[Found] = [] if not to else [_look(to, str(top), top.stat())]
    skipped: list[str] = []
    for path, item in _items(str(top), leave_out):
        status = item.stat(follow_symlinks=False)
        goes_to = f"{to}/{path}" if to else path
        if stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            found.append(_look(goes_to, item.path, status))
        else:
            skipped.append(goes_to)
    return Tree(tuple(sorted(found, key=lambda one: one.path)), tuple(sorted(skipped)))


def pick(top: Path, to: str, paths: Iterable[str]) -> Tree:
    """Take only ``paths`` (relative to ``top``) and the folders above them; those that do not exist are passed over."""
    wanted = {to: str(top)}
    for path in paths:
        if not os.path.lexists(top / path):
            continue
        for part in (path, *_above(path)):
            wanted[f"{to}/{part}"] = str(top / part)
    found = tuple(_look(goes_to, source, os.lstat(source)) for goes_to, source in sorted(wanted.items()))
    return Tree(found)


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def _look(path: str, source: str, status: os.stat_result) -> Found:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        return Found(path, source, "dir", mode & _PERMISSIONS, FOLDER_MTIME * 1_000_000_000)
    if stat.S_ISLNK(mode):
        return Found(path, source, "link", 0o777, status.st_mtime_ns, target=os.readlink(source))  # noqa: PTH115
    return Found(path, source, "file", mode & _PERMISSIONS, status.st_mtime_ns, status.st_size)


def _items(top: str, leave_out: Callable[[str, str], bool]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    folders = [("", top)]
    while folders:
        relative, folder = folders.pop()
        try:
            with os.scandir(folder) as items:
                here = list(items)
        except PermissionError as error:
            raise UsageError(f"cannot read the folder {folder}: permission denied") from error
        for item in here:
            path = f"{relative}/{item.name}" if relative else item.name
            if leave_out(path, item.name):
                continue
            yield path, item
            if item.is_dir(follow_symlinks=False):
                folders.append((path, item.path))
