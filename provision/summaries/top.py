"""What ``clusterctl top`` shows: a row for each node, or its GPUs, its network, or the processes on its GPUs. Pure."""

from __future__ import annotations

import time as clocks
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from provision.output_text import Line, Summary, size
from provision.run.view import NodeView, View
from provision.summaries.monitor import gpu_lines, network_lines, node_lines

ALL = 1 << 20  # rows that fit: the pane scrolls
UNLIMITED = 1 << 16  # columns of a pipe
WIDE = 80  # columns of a command that are shown


def top_head(view: View, width: int) -> Line:
    """How many nodes and GPUs there are, and what they do together."""
    nodes, gpus = len(view.nodes), [gpu for node in view.nodes for gpu in node.gpus]
    silent = sum(bool(node.silent) for node in view.nodes)
    use = [gpu.use for gpu in gpus if gpu.use is not None]
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    parts = (
        clocks.strftime("%H:%M:%S", clocks.localtime(view.now)),
        f"{nodes} node{'s' if nodes != 1 else ''}",
        f"{silent} without an answer" if silent else "",
        f"{len(gpus)} GPU{'s' if len(gpus) != 1 else ''}" if gpus else "",
        f"use {fmean(use):.0f} %" if use else "",
        f"{sum(power):,.0f} W" if power else "",
    )
    return Line("  ".join(filter(None, parts))[:width], "bold", None)


def top_node_lines(view: View, width: int, _height: int = 0) -> list[Line]:
    """A row for each node, however many there are."""
    if not view.nodes:
        return [Line("no node", "dim", None)]
    return node_lines(view, width, ALL)


def process_lines(view: View, _width: int = 0, _height: int = 0) -> list[Line]:
    """A row for each process on a GPU."""
    rows = [["NODE", "GPU", "PID", "USER", "MEMORY", "COMMAND"]]
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
        return [Line("no process uses a GPU", "dim", None)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = ["  ".join(f"{cell:<{each}}" for cell, each in zip(row, wide, strict=True)).rstrip() for row in rows]
    return [Line(texts[0], "dim", None), *(Line(text, "", None) for text in texts[1:])]


TABLES = (
    ("nodes", top_node_lines),
    ("GPUs: use, memory, temperature, power, SM clock, throttling", gpu_lines),
    ("processes on the GPUs", process_lines),
    ("network: interfaces and InfiniBand ports", network_lines),
)


def top_lines(view: View, width: int) -> list[Line]:
    """A snapshot: the nodes, their GPUs, and the processes on them."""
    lines = [top_head(view, width), *top_node_lines(view, width)]
    if any(node.gpus for node in view.nodes):
        each = width if width < UNLIMITED else 1  # one GPU a line, for other programs
        lines += [Line(""), *gpu_lines(view, each), Line(""), *process_lines(view)]
    return lines


def top_output(view: View, unreachable: Mapping[str, str], width: int) -> Summary:
    """One snapshot; numbers of ``--json`` are bytes, bytes per second, percent, watts, degrees Celsius and MHz."""
    data = {
        "time": view.now,
        "nodes": {node.name: _data(node) for node in view.nodes if not node.silent},
        "unreachable": dict(unreachable),
    }
    return data, "\n".join(line.text for line in top_lines(view, width))


def _data(node: NodeView) -> dict[str, Any]:
    names = ("load", "cores", "memory", "memory_total", "disk_free")
    lists: dict[str, Sequence[Any]] = {"gpus": node.gpus, "network": node.traffic, "processes": node.processes}
    return {
        **{name: getattr(node, name) for name in names},
        **{name: [asdict(each) for each in values] for name, values in lists.items()},
    }
