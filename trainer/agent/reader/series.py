"""The readings of a run as a series: each step once, in order, in about 60 bytes a step.

Several lines may tell of one step (its loss, its evaluation, its times): they make one row. A resumed run makes steps
again: where a source goes back, what it has told of that step and of later ones is dropped, and the place is kept as a
``Resume``. Every source is judged by itself, since one may be behind another one, or be another file; where two tell
the same of a step, the one that spoke first counts. Every rank has rows of its own; what names no rank is rank 0's, as
the frameworks' own loggers have it.

Where a log tells no steps at all (``counted``), rows are numbered from 1 in the order of their losses.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import merge
from itertools import groupby
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from .stream import FIELDS, Reading


class Resume(NamedTuple):
    """A place where a run went back: the last step before, and the first one that was made again."""

    after: int
    at: int


class Row(NamedTuple):
    """All that is known of a step; see ``Reading``. Where steps are only counted, ``step`` is the row's number."""

    step: int
    loss: Optional[float] = None
    lr: Optional[float] = None
    grad_norm: Optional[float] = None
    ms: Optional[float] = None
    tokens_per_second: Optional[float] = None
    eval_loss: Optional[float] = None


class _Table:
    """The rows that one source tells of one rank, by columns."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.known = array("B")  # a bit for each field that the row has
        self.columns = {name: array("d") for name in FIELDS}
        self.resumes: List[Resume] = []
        self.last: Optional[int] = None  # the step that was told last

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
        """Add what a reading tells of a step."""
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
    """See the module. ``add`` takes a reading; the rest is about the rank that is shown."""

    def __init__(self, rank: Optional[int] = None) -> None:
        self._wanted = rank
        self._placed: Dict[Tuple[int, str], _Table] = {}  # by rank and source
        self._counted: Dict[Tuple[int, str], _Table] = {}
        self._totals: Dict[int, int] = {}
        self.sources: Set[str] = set()

    def add(self, reading: Reading) -> None:
        """Take one reading; those of one log in their order."""
        rank = reading.rank or 0
        self.sources.add(reading.source)
        if reading.total is not None:
            self._totals[rank] = reading.total
        if reading.step is not None:
            self._placed.setdefault((rank, reading.source), _Table()).put(reading.step, reading)
        elif reading.loss is not None or reading.eval_loss is not None:
            table = self._counted.setdefault((rank, reading.source), _Table())
            table.put((table.last or 0) + (reading.loss is not None), reading)

    @property
    def counted(self) -> bool:
        """Whether the log tells no steps, so that the rows are only numbered."""
        return not self._placed and bool(self._counted)

    @property
    def ranks(self) -> Tuple[int, ...]:
        """All ranks that have told something."""
        return tuple(sorted({rank for rank, _ in (*self._placed, *self._counted)}))

    @property
    def rank(self) -> int:
        """Whose rows these are: the rank that was wanted, else the lowest one that tells a loss."""
        if self._wanted is not None:
            return self._wanted
        tables = self._counted if self.counted else self._placed
        telling = [rank for (rank, _), table in tables.items() if any(known & 1 for known in table.known)]
        return min(telling or [rank for rank, _ in tables] or [0])

    @property
    def total(self) -> Optional[int]:
        """The step that is the last one, as the log tells it."""
        return self._totals.get(self.rank)

    @property
    def resumes(self) -> Tuple[Resume, ...]:
        """Where the run went back; what several sources tell alike, once."""
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
    """The rows of several sources as one; each field by the first source that has it."""
    for step, rows in groupby(merge(*sources, key=_step), key=_step):
        first, *others = rows
        if others:
            told = zip(*(row[1:] for row in (first, *others)))  # noqa: B905 - strict is not known to Python 3.8
            first = Row(step, *(next((value for value in values if value is not None), None) for values in told))
        yield first


def _step(row: Row) -> int:
    return row.step


def series(readings: Iterable[Reading], rank: Optional[int] = None) -> Series:
    """The series of a log's readings.

    Args:
        readings: what ``read`` gives, of one log or of several in the order in which they were written.
        rank: whose; None: see ``Series.rank``.
    """
    found = Series(rank)
    for reading in readings:
        found.add(reading)
    return found


def as_csv(rows: Iterable[Row], counted: bool = False) -> Iterator[str]:
    """Rows as lines of CSV, first the names: ``step,loss,lr,…``, or ``line,…`` where steps are only counted.

    What is not known is empty; what is not finite is ``nan``, ``inf`` or ``-inf``.
    """
    yield ",".join(("line" if counted else "step", *Row._fields[1:]))
    for row in rows:
        yield ",".join("" if value is None else repr(value) for value in row)
