"""Follows the files of rank 0's loggers: TensorBoard's event files and Lightning's ``metrics.csv``.

Lightning draws no bar and prints no loss without a terminal, but logs to one of these. Files are found in the usual
folders. Only files of this attempt count: they did not exist before, and the name of an event file has the process that
writes it (``events.out.tfevents.TIME.HOST.PROCESS.NUMBER``).
"""

from __future__ import annotations

import os
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterable, Iterator, List, Optional, Set, Union

from ..run_files import NodePlan
from .output import Tail

if TYPE_CHECKING:
    from ..reader import Reading

FILES = 8  # at most
EVERY = 5.0  # seconds between searches
_TABLE, _EVENTS = "metrics.csv", "events.out.tfevents."
_USUAL = ("lightning_logs", "logs", "tb_logs", "runs", "tensorboard")
_VERSION = "version_"  # how Lightning's folders of runs start
_DEPTH, _FOLDERS, _ENTRIES = 3, 200, 500  # the most that one search reads
_HEADER = 4096


class Loggers:
    """The files of one attempt. Create it before the command starts."""

    def __init__(self, plan: NodePlan) -> None:
        near = (plan.output, plan.output.parent) if plan.output else ()  # of the checkpoints
        self._tops = tuple(dict.fromkeys((plan.cwd, *near)))
        self._old = set(self._found())
        self._files: Dict[Path, Union[_Events, _Table]] = {}
        self._writers: Set[str] = set()
        self._looked: Optional[float] = None

    def look(self, pids: Iterable[int], last: bool = False) -> None:
        """Find files that are new, from time to time or at the end; ``pids`` are rank 0's processes."""
        self._writers.update(map(str, pids))
        now = time.monotonic()
        if self._looked is not None and now - self._looked < EVERY and not last:
            return
        self._looked = now
        for path in self._found():
            if path in self._files or path in self._old or len(self._files) >= FILES:
                continue
            if path.name == _TABLE:
                self._files[path] = _Table(path)
            elif self._writers & set(path.name[len(_EVENTS) :].split(".")[1:]):
                self._files[path] = _Events(path)

    def readings(self, last: bool = False) -> "List[Reading]":
        """What is new in the files; ``last``: up to their ends."""
        found: "List[Reading]" = []
        while True:
            more = [reading for file in self._files.values() for reading in file.readings()]
            found += more
            if not last or not more:
                return found

    def _found(self) -> Iterator[Path]:
        for top in self._tops:
            yield from _files(top)


def _files(top: Path) -> Iterator[Path]:
    """The loggers' files in a folder, its folders, and the usual folders below; the usual ones first."""
    folders = deque([(top, 0)])
    for _ in range(_FOLDERS):
        if not folders:
            return
        folder, depth = folders.popleft()
        for entry in _entries(folder):
            usual = entry.name in _USUAL or entry.name.startswith(_VERSION)
            if entry.name == _TABLE or entry.name.startswith(_EVENTS):
                yield Path(entry.path)
            elif depth < _DEPTH and (usual or not depth or folder.name in _USUAL) and _is_folder(entry):
                (folders.appendleft if usual else folders.append)((Path(entry.path), depth + 1))


def _entries(folder: Path) -> "List[os.DirEntry[str]]":
    try:
        with os.scandir(folder) as entries:
            return list(islice(entries, _ENTRIES))
    except OSError:
        return []


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


class _Events:
    def __init__(self, path: Path) -> None:
        from ..reader.scalars import EventFile  # noqa: PLC0415 - the reader's patterns are a tenth of an agent's start

        self._tail, self._file = Tail(path), EventFile(rank=0)

    def readings(self) -> "List[Reading]":
        data, skipped = self._tail.read()
        if skipped:  # where the next record starts is not known any more
            self._file.end()
        return self._file.feed(data)


class _Table:
    """A table; Lightning writes it again with another header when a program logs a new name."""

    def __init__(self, path: Path) -> None:
        from ..reader import Reader  # noqa: PLC0415 - as above

        self._new = Reader
        self._path, self._header = path, b""
        self._tail, self._reader = Tail(path), Reader(rank=0)
        self._last: Optional[int] = None

    def readings(self) -> "List[Reading]":
        header = _first_line(self._path)
        if header != self._header:
            self._header, self._tail, self._reader = header, Tail(self._path), self._new(rank=0)
        data, skipped = self._tail.read()
        if skipped:
            self._reader.skip()
        found = [each for each in self._reader.feed(data) if self._last is None or (each.step or 0) > self._last]
        self._last = found[-1].step if found else self._last
        return found


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEADER).partition(b"\n")[0]
    except OSError:
        return b""
