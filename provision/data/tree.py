"""A file or folder that is pushed, as legs: small files travel together, large ones in ranges."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from provision.env.bundle import tar
from provision.env.bundle.manifest import Entry
from provision.env.packing import reading
from provision.env.source import scan
from provision.env.source.scan import Found
from provision.errors import UsageError
from provision.model import Leg

LARGE = 64 << 20  # bytes; a larger file travels in ranges of this length, smaller ones in tars of about it
MANY = 4096  # files in one tar at most

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tree:
    """What is pushed.

    Attributes:
        source: where it lies here.
        found: every file, symlink and folder; one file alone has the empty path.
        skipped: sockets and the like, which stay behind.
    """

    source: Path
    found: tuple[Found, ...]
    skipped: tuple[str, ...] = ()

    @property
    def single(self) -> bool:
        """Whether this is one file and no folder."""
        return len(self.found) == 1 and not self.found[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.found)


@dataclass(frozen=True)
class Pushed:
    """What one node is sent: the legs, and where their files go when all of them are there.

    Attributes:
        legs: small files unpack as ``small/PATH``, a large one as ``large/NAME``.
        large: by NAME, the path of a large file.
        small: the paths of small files and symlinks.
        folders: all folders, parents first, with their modes.
    """

    legs: tuple[Leg, ...]
    large: Mapping[str, str]
    small: tuple[str, ...]
    folders: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return sum(leg.size for leg in self.legs)


def look(source: Path) -> Tree:
    """Everything below a folder, or one file; symlinks inside are kept as they are.

    Raises:
        UsageError: it does not exist, or cannot be read.
    """
    try:
        status = source.stat()
    except OSError as error:
        raise UsageError(
            f"{source}: {(error.strerror or str(error)).lower()}", hint="clusterctl push SRC DEST"
        ) from error
    if source.is_dir():
        tree = scan.walk(source, "", leave_out=lambda _path, _name: False)
        return Tree(source, tree.found, tree.skipped)
    if not source.is_file():
        raise UsageError(f"{source} is neither a file nor a folder", hint="clusterctl push SRC DEST")
    one = Found("", str(source.resolve()), "file", status.st_mode & 0o777, status.st_mtime_ns, status.st_size)
    return Tree(source, (one,))


def plan(tree: Tree, wanted: frozenset[str], *, limit: int = LARGE) -> Pushed:
    """The legs for those files and symlinks whose paths are ``wanted``, in an order that is the same every time."""
    files = [one for one in tree.found if one.type != "dir" and one.path in wanted]
    large = [one for one in files if one.size > limit]
    small = [one for one in files if one.size <= limit]
    names = {one.path: _name(one) for one in large}
    return Pushed(
        legs=(
            *(_tar_leg(group) for group in _groups(small, limit)),
            *(leg for one in large for leg in _ranges(one, names[one.path], limit)),
        ),
        large={name: path for path, name in names.items()},
        small=tuple(one.path for one in small),
        folders=tuple((one.path, one.mode) for one in tree.found if one.type == "dir"),
    )


def _name(one: Found) -> str:
    """What names this content of a file: where it goes, how long it is, and when it was written."""
    told = f"{one.path}\0{one.mode}\0{one.size}\0{one.mtime_ns}\0{one.target}"
    return hashlib.sha256(os.fsencode(told)).hexdigest()


def _groups(files: Iterable[Found], limit: int) -> Iterator[tuple[Found, ...]]:
    group: list[Found] = []
    size = 0
    for one in files:
        if group and (size + one.size > limit or len(group) == MANY):
            yield tuple(group)
            group, size = [], 0
        group.append(one)
        size += one.size
    if group:
        yield tuple(group)


def _entry(one: Found) -> Entry:
    return Entry(f"small/{one.path}".rstrip("/"), one.type, one.mode, one.mtime, one.size, target=one.target)


def _tar_leg(group: tuple[Found, ...]) -> Leg:
    key = hashlib.sha256("".join(map(_name, group)).encode()).hexdigest()
    return Leg(key, "tar", sum(tar.span(_entry(one)) for one in group), partial(_tar, group))


def _tar(group: tuple[Found, ...]) -> Iterator[bytes]:
    """A tar stream of whole files; each is compared with what the walk saw when it has been read."""
    for one in group:
        yield tar.entry_header(_entry(one))
        if one.type == "file":
            yield from _read(one, 0, one.size)
            yield bytes(tar.padding(one.size))


def _ranges(one: Found, name: str, limit: int) -> Iterator[Leg]:
    for number, offset in enumerate(range(0, one.size, limit)):
        size = min(limit, one.size - offset)
        yield Leg(
            f"{name}.{number}",
            "range",
            size,
            partial(_read, one, offset, size),
            path=f"large/{name}",
            offset=offset,
            mode=one.mode,
            mtime=one.mtime,
        )


def _read(one: Found, offset: int, size: int) -> Iterator[bytes]:
    with reading.opened(one) as descriptor:
        for at in range(offset, offset + size, _BLOCK):
            yield reading.read_at(descriptor, at, min(_BLOCK, offset + size - at), one)
