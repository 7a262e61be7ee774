"""The lines of ``clusterctl monitor``, from a ``View`` and a size. Pure: the screen only draws them."""

from __future__ import annotations

import math
import time as clocks
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from statistics import fmean

from provision.output_text import Line, Style, duration, fold_equal, size, span
from provision.run.view import Gpu, NodeView, Point, View, folded, time_of
from provision.summaries.metrics import SIGNS
from trainer.agent.contract.expected import Range

MARKS = {"restart": "R", "hang": "H", "checkpoint": "C", "warning": "!"}  # of events on the axis of a curve
STALE = 60.0  # seconds; an agent takes a sample every ten
_BAD = {"failed", "lost", "no answer"}
_AXIS = 9  # columns of a plot's labels
BAND = "\N{LIGHT SHADE}"  # the expected band behind a curve
_EMPTY = 0x2800  # a braille sign without dots
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille sign, by row and column
_LEAST = ("LOAD", "DISK FREE", "SAMPLE", "PHASE", "RANK", "RSS", "RECEIVED", "SENT", "STATE", "STEP")


def head_lines(view: View, width: int) -> list[Line]:
    """The run and its state; its numbers; and why it failed."""
    phase = f", {view.phase}" if view.live and view.phase and view.phase != view.state else ""
    counts = [f"{len(view.nodes)} node{'s' if len(view.nodes) != 1 else ''}"]
    gpus = sum(len(node.gpus) for node in view.nodes)
    counts += [f"{gpus} GPU{'s' if gpus != 1 else ''}"] if gpus else []
    silent = sum(bool(node.silent) for node in view.nodes)
    counts += [f"{silent} without an answer"] if silent else []
    counts += [f"{view.missing} not found"] if view.missing else []
    tries = f"attempt {view.attempt:.0f} of {view.attempts:.0f}" if (view.attempts or 1) > 1 and view.attempt else ""
    age = f"{'for' if view.live else 'took'} {duration(view.age)}" if view.age is not None else ""
    first = "  ".join(part for part in (view.run, f"{view.state}{phase}", *counts, tries, age) if part)
    style: Style = "red" if view.state in _BAD else "green" if view.state == "finished" else "bold"
    why = [Line(f"why: {view.why}"[:width], "red", None)] if view.why else []
    why += [Line(view.slow[:width], "yellow", None)] if view.slow else []
    return [Line(first[:width], style, None), Line(_numbers(view, width), "", None), *why]


def _numbers(view: View, width: int) -> str:
    """The numbers of the training, as many as fit, the most important first."""
    step = "" if view.step is None else f"step {view.step:.0f}" + (f"/{view.total:.0f}" if view.total else "")
    percent = f" ({100 * min(1.0, view.step / view.total):.0f} %)" if view.step is not None and view.total else ""
    parts = (
        step + percent,
        "" if view.loss is None else f"loss {view.loss:.4g}",
        "" if view.left is None else f"{duration(view.left)} left",
        "" if view.tokens is None else f"{view.tokens:,.0f} tokens/s",
        "" if view.lr is None else f"lr {view.lr:.3g}",
        f"{view.pace:.3g} s/step" if view.pace and view.pace >= 1 else "",
        f"{view.pace * 1000:.3g} ms/step" if view.pace and view.pace < 1 else "",
    )
    text = ""
    for part in filter(None, parts):
        if text and len(text) + 2 + len(part) > width:
            break
        text += f"{'  ' if text else ''}{part}"
    return (text or "no step yet")[:width]


# --- nodes and GPUs ------------------------------------------------------------------------------


def node_lines(view: View, width: int, height: int) -> list[Line]:
    """A row for each node with its GPUs; if they do not fit, shorter ones in several columns."""
    rows = [["NODE", "RANK", "STATE", "PHASE", "STEP", "GPUS", "USE", "MEM", "TEMP", "POWER", "RSS", "SENT"]]
    rows[0] += ["RECEIVED", "LOAD", "DISK FREE", "SAMPLE"]
    rows += [_node_row(node) for node in view.nodes]
    styles: list[Style] = ["red" if node.state in _BAD else "" for node in view.nodes]
    silent = fold_equal({node.name: node.silent for node in view.nodes if node.silent})
    reasons = [Line(f"{names}: no answer: {why}", "red", None) for why, names in silent.items()]
    if len(rows) > height and width >= 2 * (_wide_cell(view.nodes) + 2):
        cells = [(_cell(node), style) for node, style in zip(view.nodes, styles, strict=True)]
        return [*_in_columns(cells, width), *reasons]
    lines = _fitted(rows, width)
    return [Line(lines[0], "dim", None), *map(Line, lines[1:], styles, repeat(None)), *reasons]


def gpu_lines(view: View, width: int) -> list[Line]:
    """One cell for each GPU: use, memory, temperature and power."""
    cells: list[tuple[str, Style]] = [
        (_gpu_cell(node, gpu), "red" if node.silent else "") for node in view.nodes for gpu in node.gpus
    ]
    if not cells:
        return [Line("no sample of a GPU yet: nodes without nvidia-smi have none", "dim", None)]
    return _in_columns(cells, width)


def _node_row(node: NodeView) -> list[str]:
    if node.silent:
        return [node.name, str(node.rank), node.state, *["-"] * 13]
    gpus, age = node.gpus, node.age
    return [
        node.name,
        str(node.rank),
        node.state,
        node.phase or "-",
        _show(node.step, lambda value: f"{value:.0f}"),
        _bars(gpus) or "-",
        _range([gpu.use for gpu in gpus], " %"),
        _range([gpu.filled for gpu in gpus], " %"),
        _range([gpu.temperature for gpu in gpus], " C"),
        _show(_sum(gpu.power for gpu in gpus), lambda value: f"{value:.0f} W"),
        _show(node.rss, size),
        _show(node.sent, lambda value: f"{size(value)}/s"),
        _show(node.received, lambda value: f"{size(value)}/s"),
        _show(node.load, lambda value: f"{value:.1f}"),
        _show(node.disk_free, size),
        f"{span(age)} ago" if age is not None and age > STALE and node.state == "running" else "-",
    ]


def _cell(node: NodeView) -> str:
    if node.silent:
        return f"{node.name} no answer"
    use, filled = ([one for one in values if one is not None] for values in _columns_of(node.gpus))
    numbers = f" {fmean(use):3.0f}%" if use else ""
    numbers += f" {max(filled):3.0f}%" if filled else ""
    return f"{node.name} {_bars(node.gpus) or node.state}{numbers}"


def _columns_of(gpus: Sequence[Gpu]) -> tuple[list[float | None], list[float | None]]:
    return [gpu.use for gpu in gpus], [gpu.filled for gpu in gpus]


def _wide_cell(nodes: Sequence[NodeView]) -> int:
    return max((len(_cell(node)) for node in nodes), default=0)


def _gpu_cell(node: NodeView, gpu: Gpu) -> str:
    values = ((gpu.use, "%"), (gpu.filled, "%"), (gpu.temperature, "C"), (gpu.power, "W"))
    return f"{node.name}:{gpu.index} " + " ".join(
        f"{'-' if value is None else f'{value:.0f}':>3}{unit}" for value, unit in values
    )


def _in_columns(cells: Sequence[tuple[str, Style]], width: int) -> list[Line]:
    wide = max(len(text) for text, _ in cells) + 2
    count = max(1, width // wide)
    rows = -(-len(cells) // count)
    lines = []
    for row in range(rows):
        mine = cells[row::rows]
        style: Style = next((style for _, style in mine if style), "")
        lines.append(Line("".join(f"{text:<{wide}}" for text, _ in mine).rstrip(), style, None))
    return lines


def _fitted(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The table without empty columns, and without those that do not fit."""
    columns = [list(column) for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    least = list(_LEAST)
    while sum(max(map(len, column)) + 2 for column in columns) - 2 > width and least:
        name = least.pop(0)
        columns = [column for column in columns if column[0] != name]
    wide = [max(map(len, column)) for column in columns]
    return [
        "  ".join(f"{cell:<{each}}" for cell, each in zip(row, wide, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _bars(gpus: Sequence[Gpu]) -> str:
    """A sign for the use of each GPU; ``?`` for one that does not report it."""
    last = len(SIGNS) - 1
    return "".join(
        "?" if gpu.use is None else SIGNS[max(0, min(last, int(gpu.use / 100 * last + 0.5)))] for gpu in gpus
    )


def _range(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, high = f"{min(known):.0f}", f"{max(known):.0f}"
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _show(value: float | None, how: Callable[[float], str]) -> str:
    return "-" if value is None else how(value)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# --- plots ---------------------------------------------------------------------------------------


def loss_plot(view: View, width: int, height: int) -> list[Line]:
    """The loss by step, with the events on its axis."""
    points = [(point.step, point.loss) for point in view.points if point.loss is not None]
    return _plot(points, width, height, _marks(view))


def speed_plot(view: View, width: int, height: int) -> list[Line]:
    """Tokens per second by step, else steps per second."""
    tokens = [(point.step, point.tokens) for point in view.points if point.tokens is not None]
    points = tokens or _steps_per_second(view.points)
    return _plot(points, width, height, _marks(view), _speed_band(view, tokens=bool(tokens)))


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


def speed_title(view: View) -> str:
    """What ``speed_plot`` shows."""
    tokens = any(point.tokens is not None for point in view.points)
    band = _speed_band(view, tokens=tokens)
    expected = f", {BAND} expected {_label(band[0])} to {_label(band[1])}" if band else ""
    return f"{'tokens/s' if tokens else 'steps/s'}{expected}"


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
    band: Range | None = None,
) -> list[Line]:
    """A curve of braille dots with its highest and lowest value; ``x`` below steps without a finite number.

    Cells in the expected ``band`` without a dot of the curve are shaded.
    """
    columns, rows = 2 * (width - _AXIS), 4 * (height - 1)
    finite = [value for _, value in points if math.isfinite(value)]
    if len(points) < 2 or not finite or columns < 4 or rows < 4:
        latest = f"{points[-1][1]:.4g}" if points else "no number yet"
        return [Line(latest, "dim", None)]
    first, last = points[0][0], points[-1][0]
    low, high = min((*finite, *(band or ()))), max((*finite, *(band or ())))
    shaded = _rows_of(band, low, high, height - 1) if band else range(0)
    bins: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        bins[min(columns - 1, (step - first) * columns // max(1, last - first))].append(value)
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
    axis = list(f"{first}{f'step {last}':>{max(1, width - _AXIS - len(str(first)))}}")
    for step, sign in marks:
        at = min(len(axis) - 1, (step - first) * (columns // 2) // max(1, last - first))
        if step >= first and axis[at] == " ":
            axis[at] = sign
    return [*lines, Line(" " * _AXIS + "".join(axis), "dim", None)]


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


# --- log and events ------------------------------------------------------------------------------


def log_lines(view: View, rank: int | None = None, search: str = "") -> list[Line]:
    """The log of all nodes by time: of one rank, with a text in it, repeats folded."""
    wanted = search.casefold()
    chosen = [
        line
        for line in view.lines
        if (rank is None or line.rank == rank) and (not wanted or wanted in line.text.casefold())
    ]
    lines = []
    for line, count in folded(chosen):
        source = line.node if line.rank is None else f"{line.node}/{line.rank}"
        more = f"(x {count}) " if count > 1 else ""  # in front: a narrow terminal cuts the end
        text = f"{time_of(line)} {source} {more}{line.text}".lstrip()
        lines.append(Line(text, "red" if "Error" in line.text else "", None))
    return lines


def event_lines(view: View) -> list[Line]:
    """The events of the run, the newest last."""
    lines = []
    for event in view.events:
        at = clocks.strftime("%H:%M:%S", clocks.gmtime(event.time))
        style: Style = "red" if event.kind == "hang" else "yellow" if event.kind in {"warning", "restart"} else ""
        lines.append(Line(f"{at} {event.kind:<10} {event.node}: {event.text}", style, None))
    return lines or [Line("no event yet", "dim", None)]
