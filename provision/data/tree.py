"""A pushed file or folder as parts: small files are sent together, large ones in ranges."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from provision.env.bundle import tar
from provision.env.bundle.manifest import Entry
from provision.env.source import files
from provision.env.source.files import Source
from provision.errors import UsageError
from provision.model import Part

LARGE = 64 << 20  # bytes; larger files are sent in ranges of this length, smaller ones in tars of about it
MANY = 4096  # files in one tar at most
STAGING = ".clusterctl-push-"  # the prefix of folders of running or interrupted pushes

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tree:
    """The pushed file or folder.

    Attributes:
        source: its path here.
        found: every file, symlink and folder below a pushed folder; a single file has the empty path.
        skipped: sockets and the like, which are not pushed.
        mode: the mode of the pushed folder itself.
    """

    source: Path
    found: tuple[Source, ...]
    skipped: tuple[str, ...] = ()
    mode: int = 0o755

    @property
    def single(self) -> bool:
        """Whether this is one file, not a folder."""
        return len(self.found) == 1 and not self.found[0].path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.found)


@dataclass(frozen=True)
class Pushed:
    """The parts for one node, and the final paths of their files.

    Attributes:
        parts: small files unpack as ``small/KEY/PATH``, so that tars never mix; a large one as ``large/NAME``.
        small: the paths of small files and symlinks, by the KEY of their part.
        large: the path of each large file, by NAME.
    """

    parts: tuple[Part, ...]
    small: Mapping[str, tuple[str, ...]]
    large: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return sum(part.size for part in self.parts)

    @property
    def room(self) -> int:
        """The space that it needs on a node, where a part exists twice while it is unpacked."""
        return self.size + max((part.size for part in self.parts), default=0)


def scan_tree(source: Path) -> Tree:
    """Everything below a folder, or one file; symlinks inside stay symlinks.

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
        tree = files.walk(source, "", skip=lambda _path, name: name.startswith(STAGING))
        return Tree(source, tree.sources, tree.skipped, status.st_mode & 0o777)
    if not source.is_file():
        raise UsageError(f"{source} is not a file or folder", hint="clusterctl push SRC DEST")
    one = Source("", str(source.resolve()), "file", status.st_mode & 0o777, status.st_mtime_ns, status.st_size)
    return Tree(source, (one,))


def plan(tree: Tree, wanted: frozenset[str], *, limit: int = LARGE) -> Pushed:
    """The parts for the files and symlinks whose paths are ``wanted``, always in the same order.

    The grouping of small files does not depend on ``wanted``, so a rerun has the same parts for the rest.
    """
    files = [one for one in tree.found if one.type != "dir"]
    groups = (
        tuple(one for one in group if one.path in wanted)
        for group in _groups((one for one in files if one.size <= limit), limit)
    )
    small = {_key(*map(_name, group)): group for group in groups if group}
    large = {_name(one): one for one in files if one.size > limit and one.path in wanted}
    return Pushed(
        parts=(
            *(_tar_part(key, group) for key, group in small.items()),
            *(part for name, one in large.items() for part in _ranges(one, name, limit)),
        ),
        small={key: tuple(one.path for one in group) for key, group in small.items()},
        large={name: one.path for name, one in large.items()},
    )


def _name(one: Source) -> str:
    """The name of a file's content: a hash of its path, mode, size, time and target."""
    return _key(one.path, str(one.mode), str(one.size), str(one.mtime_ns), one.target)


def _key(*words: str) -> str:
    """A short hash, because the name of every file in a tar contains it."""
    return hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:24]


def _groups(files: Iterable[Source], limit: int) -> Iterator[tuple[Source, ...]]:
    group: list[Source] = []
    size = 0
    for one in files:
        if group and (size + one.size > limit or len(group) == MANY):
            yield tuple(group)
            group, size = [], 0
        group.append(one)
        size += one.size
    if group:
        yield tuple(group)


def _entry(key: str, one: Source) -> Entry:
    return Entry(f"small/{key}/{one.path}".rstrip("/"), one.type, one.mode, one.mtime, one.size, target=one.target)


def _tar_part(key: str, group: tuple[Source, ...]) -> Part:
    return Part(key, "tar", sum(tar.span(_entry(key, one)) for one in group), partial(_tar, key, group))


def _tar(key: str, group: tuple[Source, ...]) -> Iterator[bytes]:
    """A tar stream of whole files; each is compared with its scan after it has been read."""
    for one in group:
        yield tar.entry_header(_entry(key, one))
        if one.type == "file":
            yield from _read(one, 0, one.size)
            yield bytes(tar.padding(one.size))


def _ranges(one: Source, name: str, limit: int) -> Iterator[Part]:
    for number, offset in enumerate(range(0, one.size, limit)):
        size = min(limit, one.size - offset)
        yield Part(
            f"{name}.{number}",
            "range",
            size,
            partial(_read, one, offset, size),
            path=f"large/{name}",
            offset=offset,
            mode=one.mode,
            mtime=one.mtime,
        )


def _read(one: Source, offset: int, size: int) -> Iterator[bytes]:
    with files.open_source(one) as descriptor:
        for at in range(offset, offset + size, _BLOCK):
            yield files.read_at(descriptor, at, min(_BLOCK, offset + size - at), one)
