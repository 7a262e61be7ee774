"""What ``clusterctl top`` shows: a row for each node, or its GPUs, its network, or the processes on its GPUs. Pure."""

from __future__ import annotations

import time as clocks
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from provision.output_text import Line, Summary, size
from provision.run.view import NodeView, View
from provision.summaries import monitor
from provision.summaries.words import Say, columns, cut, english, pad

ALL = 1 << 20  # rows that fit: the pane scrolls
UNLIMITED = 1 << 16  # columns of a pipe
WIDE = 80  # columns of a command that are shown


def top_head(view: View, width: int, say: Say = english) -> Line:
    """How many nodes and GPUs there are, and what they do together."""
    nodes, gpus = len(view.nodes), [gpu for node in view.nodes for gpu in node.gpus]
    silent = sum(bool(node.silent) for node in view.nodes)
    use = [gpu.use for gpu in gpus if gpu.use is not None]
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    parts = (
        clocks.strftime("%H:%M:%S", clocks.localtime(view.now)),
        say("{} nodes" if nodes != 1 else "{} node", nodes),
        say("{} without an answer", silent) if silent else "",
        say("{} GPUs" if len(gpus) != 1 else "{} GPU", len(gpus)) if gpus else "",
        say("use {} %", f"{fmean(use):.0f}") if use else "",
        f"{sum(power):,.0f} W" if power else "",
    )
    return Line(cut("  ".join(filter(None, parts)), width), "bold", None)


def top_node_lines(view: View, width: int, _height: int = 0, say: Say = english) -> list[Line]:
    """A row for each node, however many there are."""
    if not view.nodes:
        return [Line(say("no node"), "dim", None)]
    return monitor.node_lines(view, width, ALL, say)


def process_lines(view: View, _width: int = 0, _height: int = 0, say: Say = english) -> list[Line]:
    """A row for each process on a GPU."""
    rows = [[say(name) for name in ("NODE", "GPU", "PID", "USER", "MEM", "COMMAND")]]
    rows += [
        [
            node.name,
            "-" if each.gpu is None else str(each.gpu),
            str(each.pid),
            each.user or "?",
            "-" if each.memory is None else size(each.memory),
            each.command[:WIDE] or "?",
        ]
        for node in view.nodes
        for each in node.processes
    ]
    if len(rows) == 1:
        return [Line(say("no process uses a GPU"), "dim", None)]
    wide = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(pad(cell, each) for cell, each in zip(row, wide, strict=True)).rstrip() for row in rows]
    return [Line(texts[0], "dim", None), *(Line(text, "", None) for text in texts[1:])]


_, _GPUS, _NETWORK = monitor.TABLES
TABLES = (("nodes", top_node_lines), _GPUS, ("processes on the GPUs", process_lines), _NETWORK)


def top_lines(view: View, width: int, say: Say = english) -> list[Line]:
    """A snapshot: the nodes, their GPUs, and the processes on them."""
    lines = [top_head(view, width, say), *top_node_lines(view, width, say=say)]
    if any(node.gpus for node in view.nodes):
        each = width if width < UNLIMITED else 1  # one GPU a line, for other programs
        lines += [Line(""), *monitor.gpu_lines(view, each, say=say), Line(""), *process_lines(view, say=say)]
    return lines


def top_output(view: View, unreachable: Mapping[str, str], width: int, say: Say = english) -> Summary:
    """One snapshot; numbers of ``--json`` are bytes, bytes per second, percent, watts, degrees Celsius and MHz."""
    data = {
        "time": view.now,
        "nodes": {node.name: _data(node) for node in view.nodes if not node.silent},
        "unreachable": dict(unreachable),
    }
    return data, "\n".join(line.text for line in top_lines(view, width, say))


def _data(node: NodeView) -> dict[str, Any]:
    names = ("load", "cores", "memory", "memory_total", "disk_free")
    lists: dict[str, Sequence[Any]] = {"gpus": node.gpus, "network": node.traffic, "processes": node.processes}
    return {
        **{name: getattr(node, name) for name in names},
        **{name: [asdict(each) for each in values] for name, values in lists.items()},
    }
