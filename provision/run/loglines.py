"""The lines of a run's logs as they lie on the nodes, and many nodes' lines as one. Pure.

The agent writes ``run.log``: every line is ``TIME [RANK] TEXT``, TIME in UTC with milliseconds, and RANK is a number
or ``launcher`` (``trainer/agent/life/logs.py``).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"(\S+Z) \[(launcher|\d{1,9})\] ?(.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A line. ``rank`` is None for the launcher's own, and ``time`` is "" where the line has none."""

    time: str
    node: str
    rank: int | None
    text: str

    @property
    def shown(self) -> str:
        """As people read it."""
        source = self.node if self.rank is None else f"{self.node}/{self.rank}"
        return f"{self.time} {source} | {self.text}".lstrip()


def entry(node: str, line: str) -> Entry:
    """Read a line of ``run.log``; one that is no such line is kept as it is."""
    match = _LINE.fullmatch(line)
    if not match:
        return Entry("", node, None, line)
    return Entry(match[1], node, None if match[2] == "launcher" else int(match[2]), match[3])


def pattern(rank: int | None) -> str:
    """The grep pattern for the lines of one rank; None: for all lines."""
    return "" if rank is None else rf"^[^ ]* \[{rank}\] "


def merged(nodes: Iterable[Sequence[Entry]], last: int | None = None) -> list[Entry]:
    """The lines of several nodes in the order of their times, at most the ``last`` so many.

    A line without a time stays behind the one before it. Clocks that differ shift a node's lines against another's.
    """
    keyed = []
    for number, lines in enumerate(nodes):
        time = ""
        rows = []
        for index, line in enumerate(lines):
            time = max(time, line.time)  # a clock that was set back must not mix up a node's own lines
            rows.append((time, number, index, line))
        keyed.append(rows)
    together = [row[3] for row in heapq.merge(*keyed, key=lambda row: row[:3])]
    return together if last is None else together[max(0, len(together) - last) :]
