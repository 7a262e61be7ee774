"""Combines the readings of a run to a series: each step once, in order, in about 60 bytes per step.

Several lines about one step (its loss, its evaluation, its times) become one row. A resumed run repeats steps: if a
source goes back, its rows from that step on are dropped, and the place is kept as a ``Resume``. Sources are
independent, because one may lag behind another or be another file. If two sources have the same value of a step, the
first one counts. Every rank has its own rows. Lines without a rank belong to rank 0, as in the frameworks' own loggers.

If a log has no steps at all (``counted``), rows are numbered from 1 in the order of their losses.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from heapq import merge
from itertools import groupby
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from .stream import FIELDS, Reading


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
        if reading.step is not None:
            self._placed.setdefault((rank, reading.source), _Table()).put(reading.step, reading)
        elif reading.loss is not None or reading.eval_loss is not None:
            table = self._counted.setdefault((rank, reading.source), _Table())
            table.put((table.last or 0) + (reading.loss is not None), reading)

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
