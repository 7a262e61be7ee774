"""``clusterctl metrics``: the numbers that a run, or logs of any trainer, print step by step."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Emit
from provision.render import render
from provision.run import record as records
from provision.stages import Stage
from provision.tasks.runs import by_name, find, run_folder
from trainer.reader import MARKS, Reader, Reading, Series

if TYPE_CHECKING:
    from provision.session import Session

NAMES = ("trainer_log.jsonl", "train.log", "run.log")  # the first of these that a folder has is read
KEPT = ("run.log", "rank0.log", "launcher.log")  # the same in this machine's folder of a run's node
_BLOCK = 256 << 10
_PATIENCE = 2.0  # seconds before progress is shown
_DEADLINE = 120.0
_MOST = 64 << 20  # bytes of each log of a node


@dataclass(frozen=True)
class Log:
    """An open log. ``size``: its bytes; None if unknown, as of a pipe."""

    name: str
    file: BinaryIO
    size: int | None


@dataclass(frozen=True)
class Metrics:
    """The metrics of a run.

    Attributes:
        series: the numbers by step.
        names: the logs' names, or the run's id.
        bytes: how many were read.
    """

    series: Series
    names: tuple[str, ...]
    bytes: int


def open_log(path: Path) -> Log:
    """Open a log, or a folder's log (``NAMES``).

    Raises:
        UsageError: it does not exist, or cannot be read.
    """
    try:
        file = next((path / name for name in NAMES if (path / name).is_file()), None) if path.is_dir() else path
        if file is None:
            raise UsageError(f"no log in {path}: it has no {', '.join(NAMES)}", hint=f"name the file: {path}/FILE")
        opened = file.open("rb")
        about = path.stat() if file is path else file.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return Log(str(file), opened, about.st_size if stat.S_ISREG(about.st_mode) else None)


def read_logs(logs: Sequence[Log], *, rank: int | None = None, every: int | None = None, emit: Emit) -> Metrics:
    """Read logs, parts of one run in the order in which they were written, in constant memory but for the steps.

    Args:
        logs: closed when they are read.
        rank: the rank to read; None: the lowest rank that prints a loss.
        every: the Trainer's ``logging_steps``, for lines without a step.
        emit: receives the progress if reading takes longer than two seconds.

    Raises:
        UsageError: a log cannot be read to its end, or has no numbers.
    """
    series = Series(rank)
    sizes = [log.size for log in logs]
    meter = _Meter(sum(size or 0 for size in sizes) if None not in sizes else None, emit)
    for log in logs:
        reader = Reader(every)
        with log.file as file:
            for block in _blocks(log.name, file):
                _add(series, reader.feed(block))
                meter.more(len(block))
        _add(series, reader.close())
    meter.end()
    return _checked(Metrics(series, tuple(log.name for log in logs), meter.done))


def read_run(session: Session, word: str | None, *, rank: int | None = None, every: int | None = None) -> Metrics:
    """Read the numbers of a run from rank 0's node, or from this machine if no node answers.

    Args:
        session: the command's session.
        word: the run's id or a part of it; None: the newest.
        rank: see ``read_logs``.
        every: see ``read_logs``.

    Raises:
        UsageError: no run matches, several do, or it has printed nothing yet.
        NodesFailedError: no node answered, and this machine has no log of the run either.
    """
    with session.stage("metrics", "Asking for the run's numbers") as shown:
        try:
            run, found = find(session, word)
        except NodesFailedError as error:
            shown.states, shown.failed = error.reasons, len(error.reasons)
            shown.finish()
            return _local(session, word, error, rank=rank, every=every)
        head = run.head
        node = by_name(session.inventory)[
            head.node if head.node in head.seen_on or not head.seen_on else head.seen_on[0]
        ]
        folder = f"{run_folder(session.inventory, run.id).parent}/{head.logs}"
        script = render("run/metrics.sh.j2", logs=folder, marks=MARKS, limit=_MOST)
        outcome = session.each(lambda node: session.run(node, script, deadline=_DEADLINE).out, on=[node])
        shown.states = outcome.reasons
    if outcome.failed:
        text = f"no numbers from {node.name}, which has them"
        failed = NodesFailedError(text, reasons=outcome.reasons, hint=f"clusterctl status {run.id}")
        return _local(session, run.id, failed, rank=rank, every=every)
    if found.unreachable and head.rank and run.missing:
        text = f"rank 0's node did not answer: these are the numbers of {head.node}"
        session.warn(f"{text}; no answer from {fold(found.unreachable)}")
    series, reader = Series(rank), Reader(every)
    out = outcome.ok[node.name]
    _add(series, reader.feed(out))
    _add(series, reader.close())
    return _checked(Metrics(series, (run.id,), len(out)), f"clusterctl logs {run.id}")


def _local(
    session: Session, word: str | None, error: NodesFailedError, *, rank: int | None, every: int | None
) -> Metrics:
    """Read what an attached ``train`` wrote here of a run's first node; raises ``error`` if there is nothing."""
    known = records.kept(session.inventory.path)
    if not known:
        raise error
    run = records.choose(word, known)
    names = known[run].get("nodes") or ()
    folder = records.folder_of(session.inventory.path, run)
    folder /= str(names[0]) if isinstance(names, list) and names else ""
    path = next((folder / name for name in KEPT if (folder / name).is_file()), None)
    if path is None:
        raise error
    return read_logs([open_log(path)], rank=rank, every=every, emit=session.emit)


def _checked(found: Metrics, hint: str = "") -> Metrics:
    if not len(found.series):
        ranks = found.series.ranks
        if ranks:
            listed = ", ".join(map(str, ranks))
            raise UsageError(
                f"rank {found.series.rank} reports nothing in {', '.join(found.names)}",
                hint=f"ranks with numbers: {listed}",
            )
        raise UsageError(
            f"{', '.join(found.names)}: no line has a step, a loss or a time",
            hint=hint or "docs/metrics.md lists the supported trainers",
        )
    return found


def _add(series: Series, readings: Iterable[Reading]) -> None:
    for reading in readings:
        series.add(reading)


def _blocks(name: str, file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a file, as soon as they arrive."""
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    while True:
        try:
            block = read(_BLOCK)
        except OSError as error:
            raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
        if not block:
            return
        yield block


class _Meter:
    """Shows how far the reading is, once it takes long."""

    def __init__(self, total: int | None, emit: Emit) -> None:
        self.done = 0
        self._total, self._emit = total, emit
        self._started = time.monotonic()
        self._shown: Stage | None = None

    def more(self, count: int) -> None:
        self.done += count
        if self._shown is None and time.monotonic() - self._started > _PATIENCE:
            self._shown = Stage(self._emit, "metrics", "Reading", self._total, "bytes")
            self._shown.start()
        if self._shown:
            self._shown.progress(self.done)

    def end(self) -> None:
        if self._shown:
            self._shown.finish()
