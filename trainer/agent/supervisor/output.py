"""Follows the output of a run's processes: into the run's own logs, to the events and to the watch.

torchrun writes each worker's output to a file (``--redirects 3``), and the agent follows these files. torchrun's own
``--tee`` would turn every step of a progress bar into a line.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

if TYPE_CHECKING:
    from pathlib import Path

    from ..reader import Reading
    from .loggers import Loggers
import contextlib
import time

from ..run_files import Events, NodePlan
from .numbers import Numbers, finite

LINE = 4096  # bytes of a line that are kept
STEP = 256 << 10  # bytes read from a file at a time
BEHIND = 1 << 20  # bytes that following may lag behind before it jumps ahead

PROGRESS = ("step", "total", "loss", "lr", "epoch", "eval_loss", "grad_norm", "ms", "tokens_per_second")

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -~]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class Lines:
    """Splits a stream into lines in bounded memory.

    Text that a carriage return overwrites is dropped: of a progress bar only the last state before the newline remains.
    Terminal escapes and control characters are removed. A line keeps its first ``limit`` bytes.
    """

    def __init__(self, limit: int = LINE) -> None:
        self._limit = limit
        self._current = b""
        self._before = b""  # the text before the last carriage return
        self._cut = 0

    def feed(self, data: bytes) -> List[str]:
        """The lines that ``data`` completes, without blank ones."""
        *whole, rest = data.split(b"\n")
        lines = []
        for part in whole:
            self._grow(part)
            lines.extend(self.flush())
        self._grow(rest)
        return lines

    def flush(self) -> List[str]:
        """The text since the last newline, as a line."""
        text = _clean(self._current or self._before)
        if self._cut:
            text += " … (%d more bytes)" % self._cut
        self._current = self._before = b""
        self._cut = 0
        return [text] if text.strip() else []

    def _grow(self, part: bytes) -> None:
        first, *others = part.split(b"\r")
        self._append(first)
        for state in others:
            if self._current:
                self._before = self._current
            self._current = b""
            self._cut = 0
            self._append(state)

    def _append(self, data: bytes) -> None:
        room = self._limit - len(self._current)
        self._current += data[:room]
        self._cut += max(0, len(data) - room)


def _clean(line: bytes) -> str:
    return _CONTROLS.sub("", _ESCAPES.sub("", line.decode("utf-8", "replace"))).rstrip()


class Tail:
    """Follows a file by name. The file may not exist yet, grow, be truncated or be replaced."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self.path = path
        self._at = 0
        self._file: Optional[Tuple[int, int]] = None
        if from_end:
            try:
                now = path.stat()
                self._at, self._file = now.st_size, (now.st_dev, now.st_ino)
            except OSError:
                pass

    def read(self) -> Tuple[bytes, int]:
        """The new bytes, and how many were skipped because they came too fast."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return b"", 0
        try:
            now = os.fstat(fd)
            if self._file != (now.st_dev, now.st_ino) or now.st_size < self._at:
                self._file, self._at = (now.st_dev, now.st_ino), 0
            jumped = now.st_size - self._at - STEP if now.st_size - self._at > BEHIND else 0
            self._at += jumped
            data = os.pread(fd, STEP, self._at)
            self._at += len(data)
        except OSError:
            return b"", 0
        else:
            return data, jumped
        finally:
            os.close(fd)


class RankLogs:
    """Follows the files of torchrun's ``--log-dir``: ``<run>_<random>/attempt_<n>/<local rank>/std{out,err}.log``.

    ``on_data(path, rank, data, skipped)`` is called with new bytes, and with how many before them were skipped.
    """

    def __init__(self, folder: Path, first_rank: int, on_data: Callable[[Path, int, bytes, int], None]) -> None:
        self._on_data = on_data
        self._folder = folder
        self._first = first_rank
        self._followed: Dict[Path, Tuple[int, Tail, Lines]] = {}
        self._old = set(self._found())  # files of earlier attempts

    def _found(self) -> Iterator[Path]:
        return self._folder.glob("*/attempt_*/*/std*.log")

    def look(self) -> None:
        """Find files that are new since this object was created."""
        for path in sorted(self._found()):
            local = path.parent.name
            if path not in self._followed and path not in self._old and local.isdigit():
                self._followed[path] = (self._first + int(local), Tail(path), Lines())

    def lines(self, last: bool = False) -> Iterator[Tuple[int, str]]:
        """Rank and text of each new line; ``last`` also gives lines without a newline."""
        for path, (rank, tail, lines) in self._followed.items():
            while True:
                data, jumped = tail.read()
                self._on_data(path, rank, data, jumped)
                if jumped:
                    yield rank, "… (%d bytes skipped because the output is too fast; the log file has them)" % jumped
                for line in lines.feed(data):
                    yield rank, line
                if not last or not data:
                    break
            if last:
                for line in lines.flush():
                    yield rank, line


class Progress:
    """Follows LLaMA-Factory's ``trainer_log.jsonl``, without the lines from before the run."""

    def __init__(self, path: Optional[Path]) -> None:
        self._path = path
        self._tail = Tail(path, from_end=True) if path else None
        self._lines = Lines(limit=64 << 10)

    def exists(self) -> bool:
        """Whether the file exists. Its values are better than those in the output."""
        return self._path is not None and self._path.exists()

    def events(self) -> Iterator[Dict[str, Any]]:
        """The fields of a progress event for each new line."""
        data = self._tail.read()[0] if self._tail else b""
        if not data:
            return
        from ..reader import parse_all  # noqa: PLC0415 - its patterns are a tenth of an agent's start

        for line in self._lines.feed(data):
            for parsed in parse_all(line):
                if parsed.source == "trainer_log":
                    yield {name: finite(parsed.values[name]) for name in PROGRESS if name in parsed.values}


class Output:
    """The output of one attempt.

    ``on_line(rank, text)`` is called for every line, ``on_reading(rank, reading)`` for every place with numbers.
    ``on_progress(fields, logged)`` is called for every progress event: ``logged`` ones are from ``trainer_log.jsonl``,
    the others from the output of a run without that file, or with the user's own pattern. ``on_bytes(rank, count)`` is
    called with the number of new bytes, because a progress bar is not a line until it ends.

    It is created before the command starts: existing files are an earlier attempt's, and are skipped. ``start`` is the
    step of the checkpoint from which the attempt resumes.
    """

    def __init__(
        self,
        plan: NodePlan,
        events: Events,
        on_line: Callable[[Optional[int], str], None],
        on_progress: Callable[[Dict[str, Any], bool], None],
        on_reading: Callable[[Optional[int], Reading], None],
        on_bytes: Callable[[Optional[int], int], None],
        start: int = 0,
    ) -> None:
        self._events = events
        self._on_line = on_line
        self._on_progress = on_progress
        self._run_log = (plan.logs / "run.log").open("a", encoding="utf-8", buffering=1)
        self._launcher_log = (plan.logs / "launcher.log").open("ab", buffering=0)
        self._launcher_lines = Lines()
        self._on_bytes = on_bytes
        self._ranks = RankLogs(plan.rank_logs, plan.data.first_rank, self._data)
        pattern = plan.data.pattern
        self._numbers = Numbers(on_reading, pattern, plan.data.argv, start)
        self._reported = False  # that the pattern is too slow
        self._progress = Progress(plan.progress if pattern is None else None)
        self._loggers: Optional[Loggers] = None
        if plan.rank == 0 and pattern is None:
            from .loggers import Loggers  # noqa: PLC0415 - as above

            self._loggers = Loggers(plan)

    def take(self, fd: int) -> Optional[bytes]:
        """Read some of the command's output: None when there is nothing now, empty at its end."""
        try:
            data = os.read(fd, 64 << 10)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._keep(self._launcher_log, data)
        self._data(None, None, data, 0)
        for line in self._launcher_lines.feed(data):
            self._line(None, line)
        return data

    def look(self, pids: Iterable[int] = ()) -> None:
        """Find new files of ranks, and of the loggers of rank 0, whose processes are ``pids``."""
        self._ranks.look()
        if self._loggers is not None and not self._numbers.complete:
            self._loggers.look(pids)

    def report(self, last: bool = False) -> None:
        """Report what is new in the files; ``last``: also lines without a newline."""
        if last:
            for line in self._launcher_lines.flush():
                self._line(None, line)
        for rank, line in self._ranks.lines(last):
            self._line(rank, line)
        for progress in self._progress.events():
            self._report(progress, logged=True)
        self._read_loggers(last)
        if last:
            self._numbers.close()
        found = self._numbers.take(last)
        if found and not self._progress.exists():
            for progress in found:
                self._report(progress, logged=False)
        if self._numbers.too_slow and not self._reported:
            self._reported = True
            self._events.emit("notice", text="the pattern takes too long, and no longer reads steps and losses")

    def _read_loggers(self, last: bool) -> None:
        if self._loggers is None or self._numbers.complete or self._progress.exists():
            return
        if last:
            self._loggers.look((), last=True)
        self._numbers.logged(self._loggers.readings(last))

    def close(self) -> None:
        """Close the logs."""
        for file in (self._run_log, self._launcher_log):
            with contextlib.suppress(OSError):
                file.close()

    def _report(self, progress: Dict[str, Any], logged: bool) -> None:
        self._events.emit("progress", **progress)
        self._on_progress(progress, logged)

    def _data(self, stream: Optional[Path], rank: Optional[int], data: bytes, skipped: int) -> None:
        """Take new bytes of a rank's file, or of the launcher (None)."""
        self._on_bytes(rank, skipped + len(data))
        self._numbers.feed(stream, rank, data, skipped)

    def _line(self, rank: Optional[int], line: str) -> None:
        self._events.emit("log", rank=rank, line=line)
        now = time.time()
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + ".%03dZ" % (now % 1 * 1000)
        self._keep(self._run_log, "%s [%s] %s\n" % (at, "launcher" if rank is None else rank, line))
        self._on_line(rank, line)

    def _keep(self, file: Any, data: Any) -> None:
        """Write to a log file. A full disk ends the log, not the run."""
        if file.closed:
            return
        try:
            file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                file.close()
            self._events.emit("notice", text="%s is no longer written: %s" % (file.name, error))
