"""Follows the files of rank 0's loggers: TensorBoard's event files and Lightning's ``metrics.csv``.

Lightning draws no bar and prints no loss without a terminal, but logs to one of these. Only files of this attempt
count: event files that a process of rank 0 has open, and tables that did not exist before, in the usual folders.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, Optional, Union

from ..reader import Reader, Reading
from ..reader.scalars import NAME, EventFile
from ..run_files import NodePlan
from .output import Tail

FILES = 8  # at most
# Below the working folder, which may have any number of folders; and near the checkpoints.
_BELOW = tuple(each + "/version_*/metrics.csv" for each in ("lightning_logs", "*/lightning_logs", "logs", "logs/*"))
_NEAR = ("metrics.csv", "version_*/metrics.csv", "*/version_*/metrics.csv")
_HEADER = 4096


class Loggers:
    """The files of one attempt. Create it before the command starts."""

    def __init__(self, plan: NodePlan) -> None:
        near = (plan.output, plan.output.parent) if plan.output and plan.output != plan.cwd else ()
        self._places = [(plan.cwd, each) for each in _BELOW] + [(folder, each) for folder in near for each in _NEAR]
        self._old = set(self._tables())
        self._files: Dict[Path, Union[_Events, _Table]] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Find files that are new; ``pids`` are rank 0's processes."""
        for path in (*(path for pid in pids for path in _open_files(pid)), *self._tables()):
            if path not in self._files and path not in self._old and len(self._files) < FILES:
                self._files[path] = _Events(path) if path.name.startswith(NAME) else _Table(path)

    def readings(self, last: bool = False) -> List[Reading]:
        """What is new in the files; ``last``: up to their ends."""
        found: List[Reading] = []
        while True:
            more = [reading for file in self._files.values() for reading in file.readings()]
            found += more
            if not last or not more:
                return found

    def _tables(self) -> Iterator[Path]:
        for folder, pattern in self._places:
            yield from folder.glob(pattern)


def _open_files(pid: int) -> Iterator[Path]:
    """The event files that a process has open."""
    try:
        entries = list(Path("/proc/%d/fd" % pid).iterdir())
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):  # closed since
            path = Path(os.readlink(entry))  # noqa: PTH115 - Python 3.8 has no Path.readlink
            if path.name.startswith(NAME):
                yield path


class _Events:
    def __init__(self, path: Path) -> None:
        self._tail, self._file = Tail(path), EventFile(rank=0)

    def readings(self) -> List[Reading]:
        data, skipped = self._tail.read()
        if skipped:  # the start of a record is not known any more
            self._file = EventFile(rank=0)
            return []
        return self._file.feed(data)


class _Table:
    """A table; Lightning writes it again with another header when a program logs a new name."""

    def __init__(self, path: Path) -> None:
        self._path, self._header = path, b""
        self._tail, self._reader = Tail(path), Reader(rank=0)
        self._last: Optional[int] = None

    def readings(self) -> List[Reading]:
        header = _first_line(self._path)
        if header != self._header:
            self._header, self._tail, self._reader = header, Tail(self._path), Reader(rank=0)
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
