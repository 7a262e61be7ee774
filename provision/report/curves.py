"""The numbers of runs, packed for the page's program.

A column is base64 of little-endian floats, or a start, a distance and a count if its values are equally far apart. NaN
means that there is no value. Values that a trainer logged as NaN or infinite are listed separately, with their places.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from provision.report.data import PORT, NodeData, RunData, bands, happenings, is_finite, row_times, step_times
from trainer.reader import FIELDS

POINTS = 1_000_000  # rows of a run; of more, the page has every second, third, ... and all that are not finite
_HUGE = 3e38  # of a float of four bytes
_BAD = 1000  # values that are not finite and listed

Column = dict[str, Any]


def pack(values: Sequence[float | None], kind: str = "f") -> Column:
    """One column; ``kind`` is ``f`` (four bytes) or ``d`` (eight)."""
    if kind == "d" and len(values) > 1 and None not in values:
        first, by = values[0], (values[1] or 0) - (values[0] or 0)
        if all(value == (first or 0) + place * by for place, value in enumerate(values)):
            return {"start": first, "by": by, "n": len(values)}
    numbers = array(kind, (math.nan if value is None or not abs(value) < _HUGE else value for value in values))
    if sys.byteorder == "big":
        numbers.byteswap()
    return {kind: base64.b64encode(numbers.tobytes()).decode()}


def run_curves(run: RunData) -> dict[str, Any]:
    """A run for the page's program."""
    rows, times = run.rows, row_times(run)
    by = math.ceil(len(rows) / POINTS) if rows else 1
    if by > 1:
        kept = [place for place, row in enumerate(rows) if place % by == 0 or not is_finite(row.loss)]
        rows, times = tuple(rows[place] for place in kept), [times[place] for place in kept]
    columns, bad = {}, {}
    for place, name in enumerate(FIELDS, 1):
        values = [row[place] for row in rows]
        if any(value is not None for value in values):
            columns[name] = pack(values)
            broken = [at for at, value in enumerate(values) if value is not None and not math.isfinite(value)]
            if broken:
                bad[name] = broken[:_BAD]
    if "ms" not in columns:
        paces = step_times(rows, times)
        columns.update({"ms": pack(paces)} if any(value is not None for value in paces) else {})
    return {
        "id": run.id,
        "bands": bands(run),
        "began": run.began,
        "step": pack([row.step for row in rows], "d"),
        "time": pack(times, "d") if any(time is not None for time in times) else None,
        "columns": columns,
        "bad": bad,
        "events": [
            {"t": each.time, "s": each.step, "k": each.kind, "x": each.text[:200], "l": each.level}
            for each in happenings(run)
            if each.level and each.kind != "attempt"
        ][:200],
        "nodes": [node_curves(node) for node in run.nodes if node.samples],
    }


def node_curves(node: NodeData) -> dict[str, Any]:
    """A node's samples for the page's program."""
    columns: dict[str, list[float | None]] = {}
    for place, sample in enumerate(node.samples):
        for name, value in sample.values.items():
            if name not in columns:
                columns[name] = [None] * len(node.samples)
            columns[name][place] = value
    busy = [name for name, values in columns.items() if name.startswith(PORT) and any(values)]
    shown = busy if len(busy) > 1 else []  # one alone has the curve of the sum
    hidden = {name for name in columns if name.startswith(PORT)}.difference(shown)
    hidden.update(name for name in ("throttled",) if not any(columns.get(name, ())))
    columns = {name: values for name, values in columns.items() if name not in hidden}
    steps = [sample.step for sample in node.samples]
    return {
        "name": node.name,
        "time": pack([sample.time for sample in node.samples], "d"),
        "step": pack(steps, "d") if any(step is not None for step in steps) else None,
        "columns": {name: pack(values) for name, values in columns.items()},
    }
