"""Finds the steps of transformers' lines whose progress bar is in another stream of the same rank.

``{'loss': …}`` has an epoch but no step. There are two sources for it:

- The bar. The Trainer prints its lines with ``tqdm.write``: tqdm blanks the bar, writes the line to stdout, and draws
  the bar again on stderr (tqdm/std.py, ``external_write_mode``). So every blank with a bar after it belongs to one
  line, in the same order. Bars with a title (``Map:``) and lower bars ("cursor up": an evaluation's) are others.
- Without a bar the lines are counted, if the command line has ``--logging_steps``: from the checkpoint's step on.

Steps and epochs are proportional, except for their rounding. Where they are not, no step is reported.
"""

from __future__ import annotations

import math
import re
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

from .stream import Reading

PATIENCE = 8  # looks at the streams in which a line waits for a bar
_STATES = 4096  # bars that wait for their lines, as behind a buffered stdout
_LONGEST = 4096  # bytes of a blank and the bar after it
_BAR = rb"\r *\d{1,3}%\|[^|\r\n]{0,2000}\| (\d{1,15})/(\d{1,15}) \["
_AGAIN = re.compile(rb"\r {1,2000}\r(?:\n\r {0,2000}\r\x1b\[A){0,9}" + _BAR)


class Pace(NamedTuple):
    """When the Trainer logs, from its command line: every ``every`` steps after ``start``, up to ``total``."""

    every: int
    start: int = 0
    total: Optional[int] = None


def pace(argv: Sequence[str], start: int = 0) -> Optional[Pace]:
    """Read the pace in a command line; None: it does not have it."""
    every, total = _option(argv, "logging_steps"), _option(argv, "max_steps")
    others = any(_named(word) in ("logging_first_step", "logging_strategy") for word in argv)
    if others or not every or not every.isdigit() or not 0 < int(every) < 10**15:
        return None
    return Pace(int(every), start, int(total) if total and total.isdigit() and 0 < int(total) < 10**15 else None)


def _named(word: str) -> str:
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _option(argv: Sequence[str], name: str) -> Optional[str]:
    """The last value of an option."""
    found = None
    for word, after in zip(argv, (*argv[1:], "")):  # noqa: B905 - Python 3.8 has no strict
        if _named(word) == name:
            found = word.partition("=")[2] if "=" in word else after
    return found


class Bars:
    """The bars in one stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> List[Tuple[int, int]]:
        """Step and total of each bar that was drawn again after a line."""
        data = self._rest + data
        end, found = 0, []
        for bar in _AGAIN.finditer(data):
            found.append((int(bar.group(1)), int(bar.group(2))))
            end = bar.end()
        self._rest = data[max(end, len(data) - _LONGEST) :]
        return found


class Steps:
    """The steps of one rank's lines. Each method returns the readings that now have all they will get."""

    def __init__(self, pace: Optional[Pace] = None) -> None:
        self._pace = pace
        self._lines: Deque[Reading] = Deque()  # they wait for their bars
        self._bars: Deque[Tuple[int, int]] = Deque()  # they wait for their lines
        self._last: Optional[Reading] = None  # the last line with a step
        self._before: Optional[Reading] = None  # the last line of those that are counted
        self._waited = 0
        self._barred = False  # there are bars
        self._alone = False  # no bar can be paired with a line any more
        self._lost = False  # lines get no steps

    def line(self, reading: Reading) -> List[Reading]:
        """Take a line."""
        if reading.epoch is None or not 0 < reading.epoch < math.inf or self._lost:
            return [reading]
        if self._alone:
            return [self._counted(reading)]
        self._lines.append(reading)
        return self._match()

    def bar(self, step: int, total: int) -> List[Reading]:
        """Take a bar that was drawn again."""
        last = self._bars[-1] if self._bars else (self._last.step or 0, self._last.total) if self._last else None
        if not step or last == (step, total) or self._alone:  # an evaluation before the first step, or after a line
            return []
        if last is not None and (step < last[0] or total != last[1]):  # another training
            self._bars.clear()
            self._last = None
        self._barred = True
        self._bars.append((step, total))
        return self._give_up() if len(self._bars) > _STATES else self._match()

    def skip(self) -> List[Reading]:
        """Stop, because a part of a stream is missing."""
        self._barred = True
        return self._give_up()

    def look(self) -> List[Reading]:
        """Return the lines that have waited too long for a bar."""
        self._waited = self._waited + 1 if self._lines else 0
        return self._give_up() if self._waited > PATIENCE else []

    def close(self) -> List[Reading]:
        """Return the lines that still wait."""
        return self._give_up() if self._lines else []

    def _give_up(self) -> List[Reading]:
        """Return all lines. A later bar may belong to any of them, so it cannot be paired any more."""
        found = list(self._lines)
        self._lines.clear()
        self._bars.clear()
        self._alone, self._lost = True, self._barred
        return found if self._lost else [self._counted(line) for line in found]

    def _match(self) -> List[Reading]:
        """Pair lines and bars. Both are in order, so the first ones belong together unless the epoch contradicts."""
        found: List[Reading] = []
        while self._lines:
            line, last = self._lines[0], self._last
            if last is not None and line.epoch == last.epoch:  # an evaluation after the line of its step
                found.append(line._replace(step=last.step, total=last.total))
            elif not self._bars:
                break
            else:
                (step, total), order = self._bars[0], 0 if last is None else _compare(last, line, self._bars[0][0])
                if order < 0:  # another line that was written with this bar
                    self._bars.popleft()
                    continue
                if order == 0:
                    self._bars.popleft()
                    line = self._last = line._replace(step=step, total=total)
                found.append(line)
            self._lines.popleft()
            self._waited = 0
        return found

    def _counted(self, line: Reading) -> Reading:
        """The line with its step by counting. The first line has none: only the second one shows the pace."""
        before = self._before
        if self._pace is None or self._lost:
            return line
        every, start, total = self._pace
        if before is not None and line.epoch == before.epoch:
            return line._replace(step=self._last.step, total=total) if self._last else line
        if line.loss is None:
            return line
        if before is None:
            step, fits = (start // every + 1) * every, True
        else:  # the second line shows whether the first one had the step that was expected
            step = (before.step or 0) + every
            most = 0.3 * every if self._last is None else max(0.9, every / 2)
            fits = (line.epoch or 0) > (before.epoch or 0) and _compare(before, line, step, most) == 0
        self._lost = not fits
        if self._lost:
            return line
        self._before = line._replace(step=step, total=total)
        if before is None:
            return line
        self._last = self._before
        return self._last


def _compare(last: Reading, line: Reading, step: int, most: float = 1.0) -> int:
    """Whether a step is before (-1), at (0) or after (1) the one that the line's epoch implies.

    ``most``: the difference that counts as none, besides the rounding of epochs. The last step of an epoch may have
    fewer batches than the others.
    """
    epochs = (line.epoch or 0.0) / (last.epoch or 1.0)
    per_epoch = (last.step or 0) / (last.epoch or 1.0)
    rounding = per_epoch * (_rounded(line.epoch) + _rounded(last.epoch) * epochs)
    difference = step - (last.step or 0) * epochs
    return 0 if abs(difference) <= most + rounding else -1 if difference < 0 else 1


def _rounded(epoch: Optional[float]) -> float:
    """By how much a printed epoch may be rounded: to 4 digits (transformers 5), to 2 decimals or not (4)."""
    if not epoch:
        return 0.0
    decimals = len(("%.12g" % epoch).partition(".")[2])
    return max(0.5 * 10.0 ** (math.floor(math.log10(epoch)) - 3), 0.005 if decimals <= 2 else 0.0)
