"""After ``status``: the nodes with equal ones folded, their clocks' offsets, and the runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from provision.checks.kit.measures import Offset, show_offset
from provision.inventory import fold
from provision.output_text import Summary, fold_equal
from provision.summaries.runs import run_lines, runs_data

if TYPE_CHECKING:
    from provision.tasks.status import NodeStatus, Status

WIDTH = 80  # columns; a wider clock matrix is not shown, since the lines above it say the same
_EVERY_PAIR = 64  # nodes whose clocks are compared pair by pair in ``--json``; a thousand have a million pairs
_WIDEST = WIDTH // len("  +0.0 ±0.0")  # columns of nodes that can fit


def status_output(result: Status, now: float = 0.0) -> Summary:
    """Nodes, clocks and runs; times of ``--json`` are seconds, ``now`` is seconds since the epoch.

    ``skew`` of a node is how far its clock is ahead of every other; null for more than 64 nodes, where ``clock`` of
    each node says the same in less.
    """
    data = {
        "nodes": {
            name: {
                "uptime": node.uptime,
                "release": node.release or None,
                "clock": _data(result.offsets.get(name)),
                "skew": _skew(result.offsets, name) if len(result.offsets) <= _EVERY_PAIR else None,
            }
            for name, node in result.nodes.items()
        },
        "unreachable": dict(result.unreachable),
        "runs": runs_data(result.runs, now),
    }
    lines = [f"{names}: {state}" for state, names in fold_equal({n: _of(s) for n, s in result.nodes.items()}).items()]
    lines += [f"{names}: no answer: {why}" for why, names in fold_equal(result.unreachable).items()]
    return data, "\n".join([*lines, *_clocks(result), *run_lines(result.runs, now, result.users)])


def _data(offset: Offset | None) -> dict[str, float] | None:
    return {"seconds": round(offset.seconds, 6), "error": round(offset.error, 6)} if offset else None


def _skew(offsets: Mapping[str, Offset], name: str) -> dict[str, dict[str, float]]:
    """How far a node's clock is ahead of every other; without ``Offset.minus``, because there are n x n pairs."""
    if not (mine := offsets.get(name)):
        return {}
    return {
        other: {"seconds": round(mine.seconds - theirs.seconds, 6), "error": round(mine.error + theirs.error, 6)}
        for other, theirs in offsets.items()
        if other != name
    }


def _of(node: NodeStatus) -> str:
    release = f"release {node.release}" if node.release else "no release"
    return release if node.uptime is None else f"{release}, up {_age(node.uptime)}"


def _age(seconds: float) -> str:
    """A time span in its two largest units, so that machines started together have the same text."""
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h"
    return f"{minutes // 1440} d"


def _clocks(result: Status) -> list[str]:
    offsets = result.offsets
    unknown = [name for name in result.nodes if name not in offsets]
    lines = [f"clocks: the time of {fold(unknown)} is not known"] if unknown else []
    if len(offsets) < 2:
        return lines
    middle = _middle(offsets)
    gone = {
        name: ahead
        for name, each in offsets.items()
        if abs((ahead := each.minus(offsets[middle])).seconds) - ahead.error > result.apart
    }
    together = [name for name in offsets if name not in gone]
    if len(together) > 1:
        low, high = (pick(together, key=lambda name: offsets[name].seconds) for pick in (min, max))
        lines.append(
            f"clocks: {fold(together)} agree, "
            f"at most {show_offset(offsets[high].minus(offsets[low]), sign=False)} apart"
        )
    for name, ahead in gone.items():
        way = "ahead of" if ahead.seconds > 0 else "behind"
        far = show_offset(Offset(abs(ahead.seconds), ahead.error), sign=False)
        lines.append(f"clocks: {name} is {far} {way} {middle if len(together) == 1 else 'them'}")
    matrix = _matrix(offsets) if len(offsets) < _WIDEST else []
    return lines + (matrix if max(map(len, matrix), default=0) <= WIDTH else [])


def _milliseconds(offset: Offset) -> str:
    return f"{offset.seconds * 1000:+.1f} ±{offset.error * 1000:.1f}"


def _middle(offsets: Mapping[str, Offset]) -> str:
    """The node with the median clock."""
    in_order = sorted(offsets, key=lambda name: offsets[name].seconds)
    return in_order[(len(in_order) - 1) // 2]


def _matrix(offsets: Mapping[str, Offset]) -> list[str]:
    """The offset of the row's node from the column's node, in milliseconds."""
    cells = [["ms ahead of", *offsets]]
    for one, mine in offsets.items():
        row = [_milliseconds(mine.minus(theirs)) if one != other else "-" for other, theirs in offsets.items()]
        cells.append([one, *row])
    wide = [max(len(row[index]) for row in cells) for index in range(len(offsets) + 1)]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, wide, strict=True)) for row in cells]
