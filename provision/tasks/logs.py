"""``clusterctl logs`` and ``metrics``: the lines that a run prints, and the numbers in them.

``metrics`` also reads logs of any trainer.
"""

from __future__ import annotations

import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from provision.errors import NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Emit, Node
from provision.render import quote, render
from provision.run import record as records
from provision.run.follow import Entry, entry, merged
from provision.run.follow import pattern as rank_pattern
from provision.session.streams import Stream, Streams
from provision.ssh.remote import reading, sent_length
from provision.stages import Stage
from provision.tasks.pattern import read_pattern
from provision.tasks.runs import Runs, by_name, find, logs_folder, reader_of
from trainer.reader import MARKS, Pattern, Reader, Reading, Series

if TYPE_CHECKING:
    from provision.run.found import Part, Run
    from provision.session import Session

NAMES = ("trainer_log.jsonl", "train.log", "run.log")  # the first of these that a folder has is read
KEPT = ("run.log", "rank0.log", "launcher.log")  # the same in this machine's folder of a run's node
_BLOCK = 256 << 10
_PATIENCE = 2.0  # seconds before progress is shown
_MOST = 64 << 20  # bytes of each log of a node
_DEADLINE = 120.0


@dataclass(frozen=True)
class Logs:
    """The lines of the nodes.

    Attributes:
        run: the run's id.
        state: the run's.
        lines: of all nodes asked, in the order of their times.
        unreachable: nodes without their logs, each with the reason.
        cut: there are more lines than requested.
    """

    run: str
    state: str
    lines: tuple[Entry, ...]
    unreachable: Mapping[str, str]
    cut: bool = False


@dataclass(frozen=True)
class Wanted:
    """Which lines: of one node, of one rank, the last ones. None: all."""

    node: str | None = None
    rank: int | None = None
    last: int | None = None


def logs(
    session: Session,
    word: str | None,
    wanted: Wanted,
    *,
    show: Callable[[Logs], None],
    each: Callable[[Entry], None] | None = None,
) -> str:
    """Show a run's logs, and with ``each`` follow them until the run ends.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        wanted: which lines.
        show: receives the existing lines.
        each: receives every later line, from any thread but never two at once.

    Returns:
        The run's state at the end.

    Raises:
        UsageError: no run matches, or it did not run on that node or with that rank.
        NodesFailedError: no node answered, or no node with the logs.
    """
    run, found = find(session, word)
    parts = _parts(run, wanted, found.unreachable)
    offsets, past = _past(session, run, parts, wanted)
    show(replace(past, unreachable={**_silent(run, wanted, found), **past.unreachable}))
    if each is None or not run.live:
        return run.state
    _follow(session, [part for part in parts if part.live], offsets, wanted, each)
    return find(session, run.id)[0].state


def _parts(run: Run, wanted: Wanted, unreachable: Mapping[str, str]) -> list[Part]:
    """The wanted parts of which a node has the logs."""
    parts = [part for part in run.parts if wanted.node in {None, part.node}]
    if not parts and wanted.node not in unreachable:
        raise UsageError(f"run {run.id} did not run on {wanted.node}", hint=f"it ran on {fold(run.nodes)}")
    ranks = int(run.head.number("world_size") or 0)
    if wanted.rank is not None and ranks and wanted.rank >= ranks:
        raise UsageError(f"run {run.id} has no rank {wanted.rank}", hint=f"its ranks are 0 to {ranks - 1}")
    return [part for part in parts if part.seen_on]


def _silent(run: Run, wanted: Wanted, found: Runs) -> dict[str, str]:
    """Nodes that did not answer and may have logs of the run."""
    known = {part.node for part in run.parts if part.seen_on}
    silent = found.silent(run)
    return {name: why for name, why in silent.items() if name not in known and wanted.node in {None, name}}


def _past(session: Session, run: Run, parts: Sequence[Part], wanted: Wanted) -> tuple[dict[str, int], Logs]:
    """Where each node's log ends now, and the lines before that."""
    nodes = by_name(session.inventory)
    readers = {part.node: nodes[reader_of(part)] for part in parts}
    limit = None if wanted.last is None else wanted.last + 1
    scripts = {
        part.node: render(
            "run/logs.sh.j2",
            logs=logs_folder(session.inventory, part),
            pattern=rank_pattern(wanted.rank),
            lines=limit,
        )
        for part in parts
    }

    def ask(node: Node) -> tuple[int, list[Entry]]:
        result = session.run(readers[node.name], scripts[node.name], deadline=_DEADLINE)
        head, _, text = result.out.partition("\n")
        with reading(node):
            lines = [entry(node.name, line) for line in text.split("\n") if line]
            at = re.fullmatch(r"at ([0-9]{1,18})", head)
            return int(at[1]) if at else 0, lines

    outcome = session.each(ask, on=[nodes[part.node] for part in parts])
    if outcome.failed and not outcome.ok:
        raise NodesFailedError(
            f"no answer from {fold(outcome.failed)}",
            reasons=outcome.reasons,
            hint="are these nodes up? clusterctl status",
        )
    together = merged([lines for _, lines in outcome.ok.values()])
    cut = wanted.last is not None and len(together) > wanted.last
    kept = together[len(together) - wanted.last :] if cut and wanted.last is not None else together
    offsets = {name: offset for name, (offset, _) in outcome.ok.items()}
    return offsets, Logs(run.id, run.state, tuple(kept), outcome.reasons, cut)


def tail_script(logs: str, pid: int, first: int) -> str:
    """Sh that prints a node's log from a byte on, until the agent that owns the run exits."""
    return f"cd -- {quote(logs)} || exit 4\nexec tail --pid={pid} -c +{first} -f run.log\n"


def _follow(
    session: Session,
    parts: Sequence[Part],
    offsets: Mapping[str, int],
    wanted: Wanted,
    each: Callable[[Entry], None],
) -> None:
    nodes = by_name(session.inventory)
    lock = threading.Lock()

    def stream(part: Part) -> Stream:
        at = offsets.get(part.node, 0)

        def script() -> str:
            return tail_script(logs_folder(session.inventory, part), int(part.number("pid") or 0), at + 1)

        def line(text: str) -> bool:
            nonlocal at
            at += sent_length(text)
            found = entry(part.node, text)
            if wanted.rank in {None, found.rank}:
                with lock:
                    each(found)
            return False

        return Stream(nodes[part.node], session.connections, script, line, ends=True)

    streams = Streams([stream(part) for part in parts], session.emit)
    streams.start()
    try:
        while not all(each_one.over.wait(1.0) for each_one in streams.streams):
            streams.check()
        streams.check()
    finally:
        streams.close()


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


@dataclass(frozen=True)
class How:
    """How logs are read.

    Attributes:
        rank: the rank to read; None: the lowest rank that prints a loss.
        every: the Trainer's ``logging_steps``, for lines without a step.
        pattern: the user's pattern, which alone reads lines then; None: the run's own, or the known formats.
    """

    rank: int | None = None
    every: int | None = None
    pattern: Pattern | None = None


def read_logs(logs: Sequence[Log], how: How = How(), *, emit: Emit) -> Metrics:
    """Read logs, parts of one run in the order in which they were written, in constant memory but for the steps.

    Args:
        logs: closed when they are read.
        how: how they are read.
        emit: receives the progress if reading takes longer than two seconds.

    Raises:
        UsageError: a log cannot be read to its end, or has no numbers.
    """
    series = Series(how.rank)
    sizes = [log.size for log in logs]
    meter = _Meter(sum(size or 0 for size in sizes) if None not in sizes else None, emit)
    for log in logs:
        reader = Reader(how.every, pattern=how.pattern)
        with log.file as file:
            for block in _blocks(log.name, file):
                _add(series, reader.feed(block))
                meter.more(len(block))
        _add(series, reader.close())
    meter.end()
    return _checked(Metrics(series, tuple(log.name for log in logs), meter.done), how.pattern)


def read_run(session: Session, word: str | None, how: How = How(), *, found: tuple[Run, Runs] | None = None) -> Metrics:
    """Read the numbers of a run from rank 0's node, or from this machine if no node answers.

    Args:
        session: the command's session.
        word: the run's id or a part of it; None: the newest.
        how: how its log is read.
        found: the run, if it was searched already.

    Raises:
        UsageError: no run matches, several do, or it has printed nothing yet.
        NodesFailedError: no node answered, and this machine has no log of the run either.
    """
    with session.stage("metrics", "Asking for the run's numbers") as shown:
        try:
            run, known = found or find(session, word)
        except NodesFailedError as error:
            shown.states, shown.failed = error.reasons, len(error.reasons)
            shown.finish()
            return _local(session, word, error, how)
        head = run.head
        node = by_name(session.inventory)[reader_of(head)]
        pattern = how.pattern or _own(head.fields.get("pattern"), run.id)
        script = render(
            "run/metrics.sh.j2",
            logs=logs_folder(session.inventory, head),
            events=how.pattern is None,
            marks=MARKS if pattern is None else [pattern.mark],
            limit=_MOST,
        )
        outcome = session.each(lambda node: session.run(node, script, deadline=_DEADLINE).out, on=[node])
        shown.states = outcome.reasons
    if outcome.failed:
        text = f"no numbers from {node.name}, which has them"
        failed = NodesFailedError(text, reasons=outcome.reasons, hint=f"clusterctl status {run.id}")
        return _local(session, run.id, failed, how)
    if known.unreachable and head.rank and run.missing:
        text = f"rank 0's node did not answer: these are the numbers of {head.node}"
        session.warn(f"{text}; no answer from {fold(known.unreachable)}")
    series, out = Series(how.rank), outcome.ok[node.name]
    events, printed = _divided(out) if pattern else ("", out)
    for text, reader in ((events, Reader()), (printed, Reader(how.every, pattern=pattern))):
        _add(series, reader.feed(text))
        _add(series, reader.close())
    return _checked(Metrics(series, (run.id,), len(out)), pattern, f"clusterctl logs {run.id}")


def _own(text: object, run: str) -> Pattern | None:
    """The run's own pattern, as its agent reports it."""
    return read_pattern(text, f"the pattern of run {run}") if isinstance(text, str) else None


def _divided(out: str) -> tuple[str, str]:
    """The agent's events, which are JSON objects, and the printed lines, which begin with their time."""
    events = re.match(r"(?:\{.*\n)*", out)
    at = events.end() if events else 0
    return out[:at], out[at:]


def _local(session: Session, word: str | None, error: NodesFailedError, how: How) -> Metrics:
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
    plans = known[run].get("plans")
    plan = plans.get(folder.name) if isinstance(plans, dict) else None
    own = _own(plan.get("pattern"), run) if isinstance(plan, dict) else None
    return read_logs([open_log(path)], replace(how, pattern=how.pattern or own), emit=session.emit)


def _checked(found: Metrics, pattern: Pattern | None, hint: str = "") -> Metrics:
    names = ", ".join(found.names)
    if pattern is not None and pattern.too_slow:
        raise UsageError(
            f"{names}: the pattern takes too long: {pattern.text}",
            hint="write [^,]* or ' +' instead of .* between the values, so that a part of a line has one way to match",
        )
    if not len(found.series):
        ranks = found.series.ranks
        if ranks:
            listed = ", ".join(map(str, ranks))
            raise UsageError(
                f"rank {found.series.rank} reports nothing in {names}",
                hint=f"ranks with numbers: {listed}",
            )
        if pattern is not None:
            raise UsageError(
                f"{names}: no line matches the pattern {pattern.text}",
                hint=hint or "compare it with a line of the training; docs/metrics.md explains patterns",
            )
        raise UsageError(
            f"{names}: no line has a step, a loss or a time",
            hint=hint or "docs/metrics.md lists the supported trainers",
        )
    return found


def _add(series: Series, readings: Iterable[Reading]) -> None:
    for each in readings:
        series.add(each)


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
