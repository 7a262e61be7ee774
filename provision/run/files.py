"""The files that a run sends: their paths in the run's folder, their digests, and the tar that carries them.

In the run's folder all files are below ``job/``. A file in the config's folder keeps its path relative to the config.
Any other file goes to ``job/outside-N/NAME``, and the text that names it is rewritten.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import stat
import tarfile
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from provision.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.abc import Traversable
    from pathlib import Path

    from provision.run.ignored import Unsent
    from provision.run.needs import Need
    from provision.run.resume_args import Resuming
    from provision.run.script_source import Source

WORK = "job"
LIMIT = 2 << 30  # bytes that a run sends at most, unless the caller sets another limit
_SKIPPED = {".git", "__pycache__"}
_PIECE = 1 << 20
_PIECE_SENT = 64 << 10


@dataclass(frozen=True)
class Entry:
    """A file on this machine and its name in the run's folder."""

    source: Path
    arcname: str
    size: int
    sha256: str
    executable: bool = False
    mtime: int = 0


@dataclass(frozen=True)
class RunFiles:
    """All files that a run sends, with their digests.

    ``texts`` are generated files: the config, and files rewritten for new paths. ``progress`` is the trainer's log and
    ``output`` the folder with its checkpoints, both relative to the run's folder unless absolute. ``settings`` are the
    values of the config, or of accelerate's. ``there`` are absolute paths that the run reads on the nodes: they must
    exist and be the same on every node. ``source`` is a script's or module's, and ``resuming`` how it resumes by that;
    both are None for other programs.
    ``unsent`` is what git ignores and stays behind, the largest first.
    ``needs`` is what the release and the nodes must have.
    """

    config: Path
    config_name: str  # in job/; a module's name; the absolute path of a script on the nodes
    texts: Mapping[str, bytes]
    entries: tuple[Entry, ...]
    progress: str | None = None
    notices: tuple[str, ...] = ()
    output: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    there: tuple[str, ...] = ()
    source: Source | None = field(default=None, repr=False)
    resuming: Resuming | None = None
    unsent: tuple[Unsent, ...] = ()
    needs: tuple[Need, ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(entry.size for entry in self.entries) + sum(map(len, self.texts.values()))

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of every file, by its name in the run's folder."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in self.texts.items()}
        return digests | {entry.arcname: entry.sha256 for entry in self.entries}


@dataclass
class FileCollector:
    """Collects files while a config is read. ``where`` says, for messages, what named the file."""

    base: Path  # the config's folder, absolute
    reserved: frozenset[str] = frozenset()  # names in the run's folder that are taken
    _files: dict[str, tuple[Path, os.stat_result]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _outside: dict[Path, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The added files' paths in the run's folder."""
        return tuple(self._files)

    def place(self, path: Path) -> str:
        """The path of ``path`` (absolute, without ``..``) in the run's folder."""
        if path.is_relative_to(self.base):
            inside = f"{WORK}/{path.relative_to(self.base).as_posix()}".removesuffix("/.")
            if inside not in self.reserved:
                return inside
        for root, arcname in self._outside.items():
            if path.is_relative_to(root):
                return f"{arcname}/{path.relative_to(root).as_posix()}".removesuffix("/.")
        number = len(self._outside)
        while (self.base / f"outside-{number}").exists():
            number += 1
        self._outside[path] = f"{WORK}/outside-{number}/{path.name or 'root'}"
        return self._outside[path]

    def add(self, path: Path, where: str) -> str:
        """Add a file, or a folder with its contents. Follows links. Returns its path in the run's folder."""
        arcname = self.place(path)
        self._add(path, arcname, where, frozenset())
        return arcname

    def _add(self, path: Path, arcname: str, where: str, above: frozenset[tuple[int, int]]) -> None:
        try:
            found = path.stat()
            if stat.S_ISDIR(found.st_mode):
                identity = (found.st_dev, found.st_ino)
                if identity in above:
                    raise UsageError(f"{where}: {_shown(path)} is a link to a folder above it")
                for name in sorted(os.listdir(path)):  # noqa: PTH208 - names, not paths
                    if name not in _SKIPPED:
                        self._add(path / name, f"{arcname}/{name}", where, above | {identity})
                return
        except OSError as error:
            raise UsageError(f"{where}: {_shown(path)} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{where}: {_shown(path)} is neither a file nor a folder")
        if arcname not in self._files:
            self._files[arcname] = (path, found)
            self._sizes[where] = self._sizes.get(where, 0) + found.st_size

    def pack(self, limit: int = LIMIT) -> tuple[Entry, ...]:
        """The files with their digests, sorted.

        Raises:
            UsageError: they are larger than ``limit`` bytes together, or one cannot be read.
        """
        total = sum(self._sizes.values())
        if total > limit:
            where = max(self._sizes, key=lambda name: self._sizes[name])
            raise UsageError(
                f"{where}: {_bytes(self._sizes[where])} of the {_bytes(total)} that every run would send; "
                f"the limit is {_bytes(limit)}",
                hint="copy it to the nodes once: clusterctl push SRC DEST; then give its absolute path there",
            )
        return tuple(self._entry(arcname, *self._files[arcname]) for arcname in sorted(self._files))

    def _entry(self, arcname: str, path: Path, found: os.stat_result) -> Entry:
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        except OSError as error:
            raise UsageError(f"{_shown(path)} cannot be read: {error.strerror}") from error
        executable = bool(found.st_mode & stat.S_IXUSR)
        return Entry(path, arcname, found.st_size, digest.hexdigest(), executable, max(0, int(found.st_mtime)))


def tar_stream(files: RunFiles, extra: Mapping[str, bytes] | None = None) -> Iterator[bytes]:
    """The run's folder as an uncompressed tar, the same bytes for the same files.

    GNU format: every tar reads its long names (busybox skips pax headers), and names are plain bytes.
    ``extra`` adds files by their name in the run's folder, such as ``plan-0.json``.

    Yields:
        Pieces of at least 64 KiB, except for the last: each piece is a packet, and a tar of small files has many parts.

    Raises:
        UsageError: a file has changed since its digest was computed.
    """
    waiting = bytearray()
    for part in _parts(files, extra or {}):
        waiting += part
        if len(waiting) >= _PIECE_SENT:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _parts(files: RunFiles, extra: Mapping[str, bytes]) -> Iterator[bytes]:
    texts = {**files.texts, **extra}
    entries = {entry.arcname: entry for entry in files.entries}
    if twice := texts.keys() & entries.keys():
        raise ValueError(f"twice in one tar: {sorted(twice)}")
    try:
        mtime = int(files.config.stat().st_mtime)
    except OSError:
        mtime = 0
    for name in sorted([*texts, *entries]):
        if name in texts:
            yield _header(name, len(texts[name]), mtime)
            yield texts[name] + _padding(len(texts[name]))
        else:
            entry = entries[name]
            yield _header(name, entry.size, entry.mtime, executable=entry.executable)
            yield from _content(entry)
            yield _padding(entry.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


@lru_cache(maxsize=1 << 12)  # every node receives the same files
def _header(name: str, size: int, mtime: int, *, executable: bool = False) -> bytes:
    """The header of a file that only its user can read: configurations may have tokens."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, mtime, 0o700 if executable else 0o600
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _content(entry: Entry) -> Iterator[bytes]:
    digest = hashlib.sha256()
    left = entry.size
    try:
        with entry.source.open("rb") as file:
            while left and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                digest.update(piece)
                yield piece
            grown = bool(file.read(1))
    except OSError as error:
        raise UsageError(f"{_shown(entry.source)} cannot be read: {error.strerror}") from error
    if left or grown or digest.hexdigest() != entry.sha256:
        raise UsageError(f"{_shown(entry.source)} was changed while it was being sent", hint="start the run again")


def _shown(path: Path) -> str:
    return ascii(str(path))[1:-1] if not str(path).isprintable() else str(path)


def _bytes(size: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def sources(part: str) -> dict[str, bytes]:
    """The Python files of ``trainer/PART`` by their names, which start with ``PART/``."""
    return {f"{part}/{name}": data for name, data in _files(importlib.resources.files("trainer") / part)}


def _files(folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from ((f"{item.name}/{name}", data) for name, data in _files(item))
        elif item.name.endswith(".py"):
            yield item.name, item.read_bytes()
