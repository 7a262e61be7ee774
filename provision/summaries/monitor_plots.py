"""The curves of ``clusterctl monitor``: braille dots, the expected band behind them, and events below them. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

from provision.output_text import Line
from provision.run.view import Point, View
from provision.summaries.words import Say, english, pad
from trainer.agent.contract.expected import Range

MARKS = {"restart": "R", "hang": "H", "checkpoint": "C", "warning": "!"}  # of events on the axis of a curve
BAND = "\N{LIGHT SHADE}"  # the expected band behind a curve
_AXIS = 9  # columns of a plot's labels
_MARKED = 4  # rows of a plot that has a row for events
_EMPTY = 0x2800  # a braille sign without dots
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille sign, by row and column


def loss_plot(view: View, width: int, height: int, say: Say = english) -> list[Line]:
    """The loss by step, with the events on its axis."""
    points = [(point.step, point.loss) for point in view.points if point.loss is not None]
    return _plot(points, width, height, _marks(view), say)


def speed_plot(view: View, width: int, height: int, say: Say = english) -> list[Line]:
    """Tokens per second by step, else steps per second."""
    tokens = [(point.step, point.tokens) for point in view.points if point.tokens is not None]
    points = tokens or _steps_per_second(view.points)
    return _plot(points, width, height, _marks(view), say, _speed_band(view, tokens=bool(tokens)))


def _speed_band(view: View, *, tokens: bool) -> Range | None:
    """The expected tokens per second, or steps per second."""
    if view.expected is None or tokens:
        return view.expected and view.expected.tokens_per_second
    step = view.expected.step_seconds
    return step and (1 / step[1], 1 / step[0])


def _marks(view: View) -> list[tuple[int, str]]:
    """By step, the signs of the events that a curve may explain, or that explain the curve."""
    times = [point.time or 0.0 for point in view.points]
    signs = ((MARKS[event.kind], event.time) for event in view.events if event.kind in MARKS)
    return [(view.points[at].step, sign) for sign, time in signs if (at := bisect_left(times, time)) < len(times)]


def speed_title(view: View, say: Say = english) -> str:
    """What ``speed_plot`` shows."""
    tokens = any(point.tokens is not None for point in view.points)
    band = _speed_band(view, tokens=tokens)
    title = say("tokens/s" if tokens else "steps/s")
    return say("{}, {} expected {} to {}", title, BAND, *map(_label, band)) if band else title


def _steps_per_second(points: Sequence[Point]) -> list[tuple[int, float]]:
    timed = [(point.step, point.time) for point in points if point.time is not None]
    return [
        (step, (step - before) / (now - then))
        for (before, then), (step, now) in pairwise(timed)
        if now > then and step > before
    ]


def _plot(
    points: Sequence[tuple[int, float]],
    width: int,
    height: int,
    marks: Sequence[tuple[int, str]],
    say: Say,
    band: Range | None = None,
) -> list[Line]:
    """A curve of braille dots with its highest and lowest value; ``x`` below steps without a finite number.

    Cells in the expected ``band`` without a dot of the curve are shaded. Below the curve are a row for the signs of
    events, if there are any, and the first and the last step.
    """
    marks = [(step, sign) for step, sign in marks if points and step >= points[0][0] and height >= _MARKED]
    across, rows = 2 * (width - _AXIS), 4 * (height - 1 - bool(marks))
    finite = [value for _, value in points if math.isfinite(value)]
    if len(points) < 2 or not finite or across < 4 or rows < 4:
        latest = f"{points[-1][1]:.4g}" if points else say("no number yet")
        return [Line(latest, "dim", None)]
    first, last = points[0][0], points[-1][0]
    low, high = min((*finite, *(band or ()))), max((*finite, *(band or ())))
    shaded = _rows_of(band, low, high, rows // 4) if band else range(0)
    bins: list[list[float]] = [[] for _ in range(across)]
    for step, value in points:
        bins[min(across - 1, (step - first) * across // max(1, last - first))].append(value)
    grid, broken = _dots(bins, low, high, rows)
    lines = []
    for row, signs in enumerate(grid):
        label = _label(high) if row == 0 else _label(low) if row == len(grid) - 1 else ""
        empty = BAND if row in shaded else chr(_EMPTY)
        text = "".join(
            "x" if row == len(grid) - 1 and at in broken else empty if sign == _EMPTY else chr(sign)
            for at, sign in enumerate(signs)
        )
        lines.append(Line(f"{label:>{_AXIS - 1}} {text}", "", None))
    events = [" "] * (across // 2)
    for step, sign in marks:
        events[min(across // 2 - 1, (step - first) * (across // 2) // max(1, last - first))] = sign
    lines += [Line(" " * _AXIS + "".join(events).rstrip(), "bold", None)] if marks else []
    end = pad(say("step {}", last), max(1, width - _AXIS - len(str(first))), right=True)
    return [*lines, Line(f"{' ' * _AXIS}{first}{end}", "dim", None)]


def _rows_of(band: Range, low: float, high: float, rows: int) -> range:
    """The rows of a band, the highest value in row 0; at least one."""
    top, bottom = ((high - value) / (high - low or 1.0) * rows for value in (band[1], band[0]))
    return range(min(rows - 1, int(top)), max(int(top) + 1, min(rows, math.ceil(bottom))))


def _label(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def _dots(bins: Sequence[Sequence[float]], low: float, high: float, rows: int) -> tuple[list[list[int]], set[int]]:
    """The braille signs by row and column, and the columns with a value that is no finite number."""
    grid = [[_EMPTY] * (len(bins) // 2) for _ in range(rows // 4)]
    broken: set[int] = set()
    before: tuple[int, int] | None = None  # the last column with a value, and its dot
    for column, values in enumerate(bins):
        if any(not math.isfinite(value) for value in values):
            broken.add(column // 2)
            before = None
        known = [value for value in values if math.isfinite(value)]
        if not known:
            continue
        share = (fmean(known) - low) / (high - low) if high > low else 0.5
        dot = rows - 1 - max(0, min(rows - 1, int(share * (rows - 1) + 0.5)))
        for at, row in _between(before or (column, dot), (column, dot)):
            grid[row // 4][at // 2] |= _DOTS[row % 4][at % 2]
        before = column, dot
    return grid, broken


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line, by column and row."""
    count = max(end[0] - start[0], abs(end[1] - start[1]), 1)
    for place in range(count + 1):
        share = place / count
        yield round(start[0] + (end[0] - start[0]) * share), round(start[1] + (end[1] - start[1]) * share)
