"""``clusterctl metrics``: the numbers that a run, or logs of any trainer, tell step by step."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Emit, Inventory, Node, Notice, Progress, StageFinished, StageStarted
from provision.render import render
from provision.run import record as records
from provision.ssh.remote import Connections, RemoteError
from provision.tasks.answers import reason
from provision.tasks.prepare import run_folder
from provision.tasks.runs import by_name, find
from trainer.reader import MARKS, Reader, Reading, Series

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

NAMES = ("trainer_log.jsonl", "train.log", "run.log")  # what a folder is read for: the first of these that it has
KEPT = ("run.log", "rank0.log", "launcher.log")  # the same of what this machine keeps of a run's node
_BLOCK = 256 << 10
_PATIENCE = 2.0  # seconds before it is worth telling how far it is
_DEADLINE = 120.0
_MOST = 64 << 20  # bytes of each log of a node


@dataclass(frozen=True)
class Log:
    """A log that is open. ``size``: its bytes; None where nothing tells, as of a pipe."""

    name: str
    file: BinaryIO
    size: int | None


@dataclass(frozen=True)
class Metrics:
    """What was read.

    Attributes:
        series: the numbers by step.
        names: the logs' names, or the run's id.
        bytes: how many were read.
    """

    series: Series
    names: tuple[str, ...]
    bytes: int


def open_log(path: Path) -> Log:
    """Open a log, or the log that lies in a folder (``NAMES``).

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        file = next((path / name for name in NAMES if (path / name).is_file()), None) if path.is_dir() else path
        if file is None:
            raise UsageError(f"no log lies in {path}: it has no {', '.join(NAMES)}", hint=f"name the file: {path}/FILE")
        opened = file.open("rb")
        about = path.stat() if file is path else file.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return Log(str(file), opened, about.st_size if stat.S_ISREG(about.st_mode) else None)


def read_logs(logs: Sequence[Log], *, rank: int | None = None, every: int | None = None, emit: Emit) -> Metrics:
    """Read logs, parts of one run in the order in which they were written, in constant memory but for the steps.

    Args:
        logs: closed when they are read.
        rank: whose numbers; None: those of the lowest rank that tells a loss.
        every: the Trainer's ``logging_steps``, for its lines where nothing else tells their steps.
        emit: is told about the progress when it takes longer than two seconds.

    Raises:
        UsageError: a log cannot be read any further, or none tells anything.
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
    return _told(Metrics(series, tuple(log.name for log in logs), meter.done))


def read_run(
    inventory: Inventory,
    nodes: Sequence[Node],
    word: str | None,
    *,
    rank: int | None = None,
    every: int | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Metrics:
    """Read what the node of a run's rank 0 has of it, or where no node answers what this machine has.

    Args:
        inventory: the cluster.
        nodes: those that are asked.
        word: the run's id or a part of it; None: the newest.
        rank: see ``read_logs``.
        every: see ``read_logs``.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: no run is meant, several are, or it has told nothing yet.
        NodesFailedError: no node answered, and this machine knows nothing of the run either.
    """
    began = time.monotonic()
    emit(StageStarted("metrics", "Asking for the run's numbers"))
    with Connections(inventory, prompts) as connections:
        try:
            run, found = find(inventory, nodes, connections, word)
        except NodesFailedError as error:
            emit(StageFinished("metrics", time.monotonic() - began, error.reasons, failed=len(error.reasons)))
            return _here(inventory, word, error, rank=rank, every=every, emit=emit)
        head = run.head
        node = by_name(inventory)[head.node if head.node in head.seen_on or not head.seen_on else head.seen_on[0]]
        folder = f"{run_folder(inventory, run.id).parent}/{head.logs}"
        script = render("run/metrics.sh.j2", logs=folder, marks=MARKS, limit=_MOST)
        try:
            out = connections[node].run(script, deadline=_DEADLINE).out
        except RemoteError as error:
            why = {node.name: reason(error, inventory, node)}
            emit(StageFinished("metrics", time.monotonic() - began, why))
            again = f"clusterctl status {run.id}"
            failed = NodesFailedError(f"no numbers from {node.name}, which has them", reasons=why, hint=again)
            return _here(inventory, run.id, failed, rank=rank, every=every, emit=emit)
    emit(StageFinished("metrics", time.monotonic() - began))
    if found.unreachable and head.rank and run.missing:
        text = f"rank 0's node is not among those that answered: these are the numbers of {head.node}"
        emit(Notice(f"{text}; no answer from {fold(found.unreachable)}", "warning"))
    series, reader = Series(rank), Reader(every)
    _add(series, reader.feed(out))
    _add(series, reader.close())
    return _told(Metrics(series, (run.id,), len(out)), f"clusterctl logs {run.id}")


def _here(
    inventory: Inventory, word: str | None, error: NodesFailedError, *, rank: int | None, every: int | None, emit: Emit
) -> Metrics:
    """What an attached ``train`` has written here of a run's first node."""
    known = records.kept(inventory.path)
    if not known:
        raise error
    run = records.choose(word, known)
    names = known[run].get("nodes") or ()
    folder = records.folder_of(inventory.path, run) / (str(names[0]) if isinstance(names, list) and names else "")
    path = next((folder / name for name in KEPT if (folder / name).is_file()), None)
    if path is None:
        raise error
    return read_logs([open_log(path)], rank=rank, every=every, emit=emit)


def _told(found: Metrics, hint: str = "") -> Metrics:
    if not len(found.series):
        ranks = found.series.ranks
        if ranks:
            listed = ", ".join(map(str, ranks))
            raise UsageError(
                f"rank {found.series.rank} tells nothing in {', '.join(found.names)}", hint=f"ranks that do: {listed}"
            )
        raise UsageError(
            f"{', '.join(found.names)}: no line tells a step, a loss or a time",
            hint=hint or "docs/metrics.md has the trainers whose lines are understood",
        )
    return found


def _add(series: Series, readings: Iterable[Reading]) -> None:
    for reading in readings:
        series.add(reading)


def _blocks(name: str, file: BinaryIO) -> Iterator[bytes]:
    """What comes, as soon as it comes."""
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
    """Tells how far the reading is, once it takes long."""

    def __init__(self, total: int | None, emit: Emit) -> None:
        self.done = 0
        self._total, self._emit = total, emit
        self._began = time.monotonic()
        self._tells = False

    def more(self, count: int) -> None:
        self.done += count
        if not self._tells and time.monotonic() - self._began > _PATIENCE:
            self._tells = True
            self._emit(StageStarted("metrics", "Reading", self._total, "bytes"))
        if self._tells:
            self._emit(Progress("metrics", self.done, self._total))

    def end(self) -> None:
        if self._tells:
            self._emit(StageFinished("metrics", time.monotonic() - self._began))
