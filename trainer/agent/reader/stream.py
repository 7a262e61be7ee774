"""Reads a log of any size in constant memory, and combines its readings to a series: each step once, in order.

Bytes go in, readings come out (``read``). Other lines of the log complete what a line lacks:

- transformers' lines have no step. The Trainer redraws its progress bar after each of them, and this state of the bar
  has the step (the state before may be older, because tqdm draws rarely). If two lines follow each other without a bar,
  lines and bar take different ways (a buffered stdout, ``torchrun --tee``) and cannot be matched: from there on no step
  is known. A bar that ends with "cursor up" is below another one: an evaluation's.
- Without a bar the lines are counted, if ``logging_steps`` is known (given, or printed with the other arguments): from
  the start of the log or a resume with a step, until the epochs show that a line is missing.
- DeepSpeed's times have no step: they belong to the step in the line before.
- examples and tokens per second become times, and times tokens per second, if the log has the number per step.
- lines that no special format knows are read by ``general``, and ``places`` turns steps of an epoch into steps of the
  training.
- ``trainer_log.jsonl`` has the time in whole seconds: a step time is computed every ``PACE`` seconds, to 5 %.

A series needs about 60 bytes per step. Several lines about one step (its loss, its evaluation, its times) become one
row. A resumed run repeats steps: if a source goes back, its rows from that step on are dropped, and the place is kept
as a ``Resume``. Sources are independent, because one may lag behind another or be another file. If two sources have
the same value of a step, the first one counts. Every rank has its own rows. Lines without a rank belong to rank 0, as
in the frameworks' own loggers. If a log has no steps at all (``counted``), rows are numbered from 1 in the order of
their losses.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from heapq import merge
from itertools import groupby
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from . import general, places, tables
from .formats import MARKS, LogLine, parse_all, plain
from .pattern import Pattern, place

LIMIT = 64 << 10  # bytes of a line that are kept: no trainer writes longer lines
PACE = 20  # seconds

_MARKS = tuple(mark.encode() for mark in MARKS)
_ASCII_MARKS = tuple(mark for mark in _MARKS if mark.isascii())
_BARS = (b"%|",)
_BAR = re.compile(r"\s*\d+%\|[^|]*\| (\d{1,15})/(\d{1,15}) \[[^\]]*, +(?:(\d+(?:\.\d+)?)(it/s|s/it)|\?it/s)\]")
_RANK = re.compile(r"\[(?:rank|default|Rank )(\d{1,9})\]|^\S+Z \[(\d{1,9})\] ")


class Reading(NamedTuple):
    """The values at one place of a log.

    ``step``: None if the log does not have it. ``loss``: of the training, as logged (a mean over the steps since
    the last one, or a single step's); NaN and infinite values are kept. ``lr``: the learning rate. ``grad_norm``:
    before clipping. ``ms``: milliseconds per optimizer step. ``tokens_per_second``: of all ranks. ``eval_loss``: of
    an evaluation. ``rank``: None if the line has none. ``total``: the number of the last step. ``source``: the format,
    see ``formats``. ``epoch``: as printed, of transformers' lines only.
    """

    step: Optional[int] = None
    loss: Optional[float] = None
    lr: Optional[float] = None
    grad_norm: Optional[float] = None
    ms: Optional[float] = None
    tokens_per_second: Optional[float] = None
    eval_loss: Optional[float] = None
    rank: Optional[int] = None
    total: Optional[int] = None
    source: str = ""
    epoch: Optional[float] = None


FIELDS = ("loss", "lr", "grad_norm", "ms", "tokens_per_second", "eval_loss")


def read(
    parts: Iterable[Union[bytes, str]], logging_steps: Optional[int] = None, pattern: Optional[str] = None
) -> Iterator[Reading]:
    """Read a log.

    Args:
        parts: the log, in pieces of any size: an open file (binary, or text), blocks, lines with their newlines.
        logging_steps: the Trainer's argument of that name, for lines whose step is not known otherwise.
        pattern: a regular expression that reads the lines of the training, see ``pattern``; None: the known formats.

    Raises:
        PatternError: the pattern cannot be used.
    """
    reader = Reader(logging_steps, pattern=None if pattern is None else Pattern(pattern))
    for part in parts:
        yield from reader.feed(part)
    yield from reader.close()


class Reader:
    """See the module. ``feed`` takes the log piece by piece.

    ``rank``: whose log it is, for lines without a rank. ``pattern``: the user's; only it reads lines then.
    """

    def __init__(
        self, logging_steps: Optional[int] = None, rank: Optional[int] = None, pattern: Optional[Pattern] = None
    ) -> None:
        self._rest = b""
        self._rank = rank
        self._skips = False  # until the next line starts
        self._trainer = _Trainer(logging_steps)
        self._steps: Dict[Optional[int], int] = {}  # by rank: DeepSpeed's last step without a time
        self._places = places.Places()
        self._tables = tables.Tables()
        self._document = tables.Document()
        self._pattern = pattern
        self._document.open = pattern is None
        self._batch = self._tokens = 0  # examples (DeepSpeed) and tokens (nanoGPT) per step
        self._paced: Optional[Tuple[int, int]] = None  # step and seconds from which the next step time is measured

    def feed(self, data: Union[bytes, str]) -> List[Reading]:
        """Return the readings that ``data`` completes."""
        data = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
        if self._skips:
            _, begins, data = data.partition(b"\n")
            self._skips = not begins
        found: List[Reading] = []
        if self._document.open:
            entries, data = self._document.feed(data)
            found.extend(self._placed(entries, "trainer"))
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._take(data[:end], found)
        self._rest = data[end:]
        if len(self._rest) > LIMIT:  # an unfinished progress bar, or not a log
            states, _, self._rest = self._rest.rpartition(b"\r")
            self._take(states, found)
            self._rest = self._rest[:LIMIT]
        return found

    def reads(self, line: str) -> bool:
        """Whether a line can have values: a cheap test for lines that come one by one."""
        return self._tables.open or any(mark in line for mark in MARKS)

    def skip(self) -> None:
        """Forget the unfinished line, and skip the rest of it: a part of the log is missing here."""
        self._rest, self._skips = b"", True

    def close(self) -> List[Reading]:
        """Return the waiting readings. A last line without a newline counts only if its end is certain."""
        found: List[Reading] = []
        entries, rest = self._document.close()
        found.extend(self._placed(entries, "trainer"))
        if rest:
            found.extend(self.feed(rest))
        states, _, last = self._rest.rpartition(b"\r")
        self._take(states, found)
        if self._pattern is not None:
            found.extend(self._matched(self._pattern, last, finished=False))
        elif plain(last.decode("utf-8", "replace")).rstrip().endswith("}"):
            self._take(last, found)
        self._rest = b""
        found.extend(self._trainer.close())
        return found

    def _take(self, data: bytes, found: List[Reading]) -> None:
        data = data.replace(b"\r", b"\n")
        if self._pattern is not None:
            found.extend(self._matched(self._pattern, data))
            return
        at = 0
        marks = _ASCII_MARKS if data.isascii() else _MARKS
        for start, end in _lines(data, marks, 0, len(data)):
            self._bars(data, at, start, found)
            self._rows(data, at, start, found)
            text = plain(data[start : min(end, start + LIMIT)].decode("utf-8", "replace"))
            lines = list(parse_all(text))
            for line in lines:
                found.extend(self._readings(line, self._whose(text, line.at)))
            if not lines and end - start <= LIMIT:
                others = list(self._general(text))
                found.extend(others)
                if not others:
                    self._tables.header(text)
            at = end
        self._bars(data, at, len(data), found)
        self._rows(data, at, len(data), found)

    def _matched(self, pattern: Pattern, data: bytes, *, finished: bool = True) -> Iterator[Reading]:
        """The readings of the lines that the user's pattern matches."""
        for values, text, at in pattern.read(data, finished=finished):
            rank = self._whose(text, at)
            yield _reading(place(self._places, values, rank), rank, "pattern")

    def _rows(self, data: bytes, start: int, end: int, found: List[Reading]) -> None:
        """Read the rows of an open table."""
        while self._tables.open and start < end:
            to = data.find(b"\n", start, end)
            to = end if to < 0 else to
            text = plain(data[start : min(to, start + LIMIT)].decode("utf-8", "replace"))
            found.extend(self._placed([self._tables.row(text)], "text"))
            start = to + 1

    def _placed(self, entries: Iterable[Dict[str, Any]], source: str) -> Iterator[Reading]:
        for values in entries:
            placed = self._places.place(values, self._rank)
            if placed is not None:
                yield _reading(placed, placed.get("rank", self._rank), source)

    def _general(self, text: str) -> Iterator[Reading]:
        """The reading of a line that no special format knows. Only a whole line shows where its last number ends."""
        for values, at in general.read_line(text):
            rank = self._whose(text, at)
            placed = self._places.place(values, rank)
            if placed is not None:
                yield _reading(placed, placed.get("rank", rank), "text")

    def _whose(self, text: str, at: int) -> Optional[int]:
        """The rank of the values at a place in a line."""
        rank = _rank(text, at) if at and "[" in text else None
        return self._rank if rank is None else rank

    def _bars(self, data: bytes, start: int, end: int, found: List[Reading]) -> None:
        """Find the state of the bar for a waiting line."""
        if self._trainer.waits:
            for at, to in _lines(data, _BARS, start, end):
                text = data[at : min(to, at + LIMIT)].decode("utf-8", "replace")
                found.extend(self._trainer.bar(text))
                if not self._trainer.waits:
                    return

    def _readings(self, line: LogLine, rank: Optional[int]) -> Iterator[Reading]:
        values = line.values
        if line.source == "trainer":
            yield from self._trainer.line(values, rank)
            return
        self._batch = values.get("batch", self._batch)
        self._tokens = values.get("tokens", self._tokens)
        if line.source == "deepspeed":
            values = self._deepspeed(values, rank)
        elif line.source == "trainer_log":
            values = self._trainer_log(values)
        elif line.source == "nanogpt" and self._tokens and values.get("ms"):
            values = {"tokens_per_second": self._tokens / values["ms"] * 1e3, **values}
        if any(name in values for name in FIELDS):
            yield _reading(values, rank, line.source)

    def _deepspeed(self, values: Dict[str, Any], rank: Optional[int]) -> Dict[str, Any]:
        if values.get("step") == 0:  # printed before the first step, also by a resumed run
            return {}
        if "step" in values:
            self._steps[rank] = values["step"]
            speed = values.get("samples_per_second") or math.nan
            return {"ms": self._batch / speed * 1e3, **values} if self._batch and math.isfinite(speed) else values
        step = self._steps.pop(rank, None)
        return values if step is None else {"step": step, **values}

    def _trainer_log(self, values: Dict[str, Any]) -> Dict[str, Any]:
        if "elapsed" not in values:
            return values
        step, elapsed = values["step"], values["elapsed"]
        if self._paced is None or step < self._paced[0] or elapsed < self._paced[1]:
            self._paced = (step, elapsed)
        steps, seconds = step - self._paced[0], elapsed - self._paced[1]
        if seconds < PACE or not steps:
            return values
        self._paced = (step, elapsed)
        return {"ms": seconds / steps * 1e3, **values}


class _Trainer:
    """Finds the steps of transformers' lines."""

    def __init__(self, logging_steps: Optional[int]) -> None:
        self._every = logging_steps
        self._waiting: Optional[Dict[str, Any]] = None  # a line that gets its step from the next state of the bar
        self._apart = False  # lines and bar take different ways
        self._from: Optional[int] = 0  # the step from which lines are counted; None: they are not
        self._counted: Optional[Tuple[int, float]] = None  # the last step that was counted, and its epoch

    @property
    def waits(self) -> bool:
        """Whether a line waits for a bar."""
        return self._waiting is not None

    def line(self, values: Dict[str, Any], rank: Optional[int]) -> Iterator[Reading]:
        """Handle a line."""
        self._every = values.get("logging_steps") or self._every
        if "first_step" in values:  # the first line is not of step ``logging_steps``
            self._from = None
        if "from_step" in values:
            self._from, self._counted = values["from_step"], None
        if "loss" not in values and "eval_loss" not in values:
            return
        yield from self.close()
        numbered = {**self._count(values), **values}
        if self._apart or rank is not None or "step" in values:
            yield _reading(numbered, rank, "trainer")
        else:
            self._waiting = numbered

    def bar(self, text: str) -> Iterator[Reading]:
        """Handle a state of a progress bar while a line waits."""
        above = "\x1b[A" in text  # the cursor moves up: this is the lower bar of two
        found = None if above else _BAR.match(plain(text))
        if found and self._waiting is not None:
            values, self._waiting = self._waiting, None
            step, total, pace, unit = found.groups()
            if int(step):  # step 0 is another process's bar: the line was the last one of its process
                values = {**values, "step": int(step), "total": int(total)}
                if pace and float(pace):
                    values["ms"] = 1e3 / float(pace) if unit == "it/s" else float(pace) * 1e3
            yield _reading(values, None, "trainer")

    def close(self) -> Iterator[Reading]:
        """Return the waiting line: no bar follows."""
        if self._waiting is not None:
            values, self._waiting, self._apart = self._waiting, None, True
            yield _reading(values, None, "trainer")

    def _count(self, values: Dict[str, Any]) -> Dict[str, Any]:
        """The step of a line by counting, if possible."""
        epoch = values.get("epoch")
        if self._every is None or self._from is None or not epoch or not math.isfinite(epoch):
            return {}
        if "loss" not in values:  # an evaluation: at the same epoch as the line before, it is at the same step
            return {"step": self._counted[0]} if self._counted and self._counted[1] == epoch else {}
        last = self._counted[0] if self._counted else self._from
        step = (last // self._every + 1) * self._every
        if self._counted and abs(epoch * last / self._counted[1] - step) > self._every / 2:
            self._from = self._counted = None  # a line is missing, or another run started
            return {}
        self._counted = (step, epoch)
        return {"step": step}


def _lines(data: bytes, marks: Sequence[bytes], start: int, end: int) -> Iterator[Tuple[int, int]]:
    """Start and end of each line with one of the marks, in a part of ``data``. Skips most lines unread."""
    places = {mark: data.find(mark, start, end) for mark in marks}
    places = {mark: place for mark, place in places.items() if place >= 0}
    while places:
        place = min(places.values())
        begins = max(start, data.rfind(b"\n", start, place) + 1)
        start = data.find(b"\n", place, end)
        start = end if start < 0 else start
        yield begins, start
        for mark, place in [*places.items()]:
            if place < start:
                places[mark] = data.find(mark, start, end)
                if places[mark] < 0:
                    del places[mark]


def _rank(text: str, at: int) -> Optional[int]:
    """The nearest rank before a place in a line."""
    found = [first or second for first, second in _RANK.findall(text, 0, at)]
    return int(found[-1]) if found else None


def _reading(values: Dict[str, Any], rank: Optional[int], source: str) -> Reading:
    get = values.get
    epoch = get("epoch") if source == "trainer" else None
    return Reading._make((get("step"), *map(get, FIELDS), rank, get("total"), source, epoch))


class Resume(NamedTuple):
    """A place where a run went back: the last step before it, and the first repeated step."""

    after: int
    at: int


class Row(NamedTuple):
    """The values of a step; see ``Reading``. If steps are only counted, ``step`` is the row's number."""

    step: int
    loss: Optional[float] = None
    lr: Optional[float] = None
    grad_norm: Optional[float] = None
    ms: Optional[float] = None
    tokens_per_second: Optional[float] = None
    eval_loss: Optional[float] = None


_EVALUATED = 1 << FIELDS.index("eval_loss")  # in ``_Table.known``


class _Table:
    """The rows of one source and one rank, by columns."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.known = array("B")  # one bit for each field of the row
        self.columns = {name: array("d") for name in FIELDS}
        self.resumes: List[Resume] = []
        self.last: Optional[int] = None  # the last step that was added

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Row:
        known, columns = self.known[place], self.columns
        values = (columns[name][place] if known >> bit & 1 else None for bit, name in enumerate(FIELDS))
        return Row(self.steps[place], *values)

    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows from a place on."""
        return (self[place] for place in range(max(0, start), len(self)))

    def put(self, step: int, reading: Reading) -> None:
        """Add the values of a reading to a step."""
        if self.last is not None and step < self.last:
            self.resumes.append(Resume(self.last, step))
            self._drop(bisect_left(self.steps, step))
        self.last = step
        place = bisect_left(self.steps, step)
        if place == len(self.steps) or self.steps[place] != step:
            self.steps.insert(place, step)
            self.known.insert(place, 0)
            for column in self.columns.values():
                column.insert(place, 0.0)
        for bit, name in enumerate(FIELDS):
            value = getattr(reading, name)
            if value is not None:
                self.columns[name][place] = value
                self.known[place] |= 1 << bit

    def _drop(self, place: int) -> None:
        del self.steps[place:]
        del self.known[place:]
        for column in self.columns.values():
            del column[place:]


class Series:
    """See the module. ``add`` takes a reading; everything else is about the shown rank."""

    def __init__(self, rank: Optional[int] = None) -> None:
        self._wanted = rank
        self._placed: Dict[Tuple[int, str], _Table] = {}  # by rank and source
        self._counted: Dict[Tuple[int, str], _Table] = {}
        self._totals: Dict[int, int] = {}
        self.sources: Set[str] = set()

    def add(self, reading: Reading) -> None:
        """Add a reading. The readings of one log must be in order."""
        rank = reading.rank or 0
        self.sources.add(reading.source)
        if reading.total is not None:
            self._totals[rank] = reading.total
        elif (reading.step or 0) > self._totals.get(rank, general.MOST):
            del self._totals[rank]  # it was that of an epoch
        if reading.step is not None:
            self._placed.setdefault((rank, reading.source), _Table()).put(reading.step, reading)
        elif reading.loss is not None or reading.eval_loss is not None:
            table = self._counted.setdefault((rank, reading.source), _Table())
            # A pattern may read evaluations only.
            alone = reading.source == "pattern" and (not table.known or table.known[-1] & _EVALUATED)
            table.put((table.last or 0) + bool(reading.loss is not None or alone), reading)

    @property
    def counted(self) -> bool:
        """Whether the log has no steps, so that rows are only numbered."""
        return not self._placed and bool(self._counted)

    @property
    def ranks(self) -> Tuple[int, ...]:
        """All ranks with values."""
        return tuple(sorted({rank for rank, _ in (*self._placed, *self._counted)}))

    @property
    def rank(self) -> int:
        """The shown rank: the requested one, else the lowest one with a loss."""
        if self._wanted is not None:
            return self._wanted
        tables = self._counted if self.counted else self._placed
        with_loss = [rank for (rank, _), table in tables.items() if any(known & 1 for known in table.known)]
        return min(with_loss or [rank for rank, _ in tables] or [0])

    @property
    def total(self) -> Optional[int]:
        """The number of the last step, from the log."""
        return self._totals.get(self.rank)

    @property
    def resumes(self) -> Tuple[Resume, ...]:
        """The places where the run went back, without duplicates."""
        return tuple(dict.fromkeys(resume for table in self._tables for resume in table.resumes))

    def __len__(self) -> int:
        tables = self._tables
        return len(tables[0]) if len(tables) == 1 else len({step for table in tables for step in table.steps})

    def __iter__(self) -> Iterator[Row]:
        return _joined([table.rows() for table in self._tables])

    def last(self, count: int) -> List[Row]:
        """The last rows, at most ``count``."""
        rows = list(_joined([table.rows(len(table) - count) for table in self._tables]))
        return rows[max(0, len(rows) - count) :]

    @property
    def _tables(self) -> List[_Table]:
        rank, tables = self.rank, self._counted if self.counted else self._placed
        return [table for (whose, _), table in tables.items() if whose == rank]


def _joined(sources: Sequence[Iterator[Row]]) -> Iterator[Row]:
    """Merge the rows of several sources; each field comes from the first source that has it."""
    for step, rows in groupby(merge(*sources, key=_step), key=_step):
        first, *others = rows
        if others:
            columns = zip(*(row[1:] for row in (first, *others)))  # noqa: B905 - Python 3.8 has no strict
            first = Row(step, *(next((value for value in values if value is not None), None) for values in columns))
        yield first


def _step(row: Row) -> int:
    return row.step


def series(readings: Iterable[Reading], rank: Optional[int] = None) -> Series:
    """Build a series of readings.

    Args:
        readings: the results of ``read``, of one log or of several in the order of writing.
        rank: the shown rank; None: see ``Series.rank``.
    """
    found = Series(rank)
    for reading in readings:
        found.add(reading)
    return found


def as_csv(rows: Iterable[Row], counted: bool = False) -> Iterator[str]:
    """Format rows as lines of CSV with a header: ``step,loss,lr,…``, or ``line,…`` if steps are only counted.

    Unknown values are empty. Values that are not finite are ``nan``, ``inf`` or ``-inf``.
    """
    yield ",".join(("line" if counted else "step", *Row._fields[1:]))
    for row in rows:
        yield ",".join("" if value is None else repr(value) for value in row)
