"""The lines of ``clusterctl monitor``, from a ``View`` and a size. Pure: the screen only draws them.

``say`` gives the words in the user's language.
"""

from __future__ import annotations

import re
import time as clocks
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from statistics import fmean

from provision.output_text import Line, Style, clean, duration, fold_equal, size, span
from provision.run.found import Run
from provision.run.sampled import Gpu, Process
from provision.run.view import Happening, NodeView, View, folded, time_of
from provision.summaries.metrics import SIGNS
from provision.summaries.words import Say, columns, cut, english, pad
from trainer.agent.contract.throttle import HARDWARE

STALE = 60.0  # seconds; an agent takes a sample every ten
_BAD = {"failed", "lost", "no answer"}
_USERS = 60  # columns of the users of a node's GPUs
_ATTEMPT = re.compile(r"attempt (\d+) from (.+)")
_LEAST = (
    "DISK FREE",
    "MEMORY",
    "LOAD",
    "SAMPLE",
    "PHASE",
    "RANK",
    "RSS",
    "RECEIVED",
    "SENT",
    "CLOCK",
    "STATE",
    "STEP",
    "POWER",
    "TEMP",
)
SIGN_OF = {  # of a reason that slows a GPU down, where there is no space for its name
    "hw_thermal_slowdown": "T", "sw_thermal_slowdown": "t", "hw_power_brake_slowdown": "B", "hw_slowdown": "H",
    "sw_power_cap": "p", "sync_boost": "s", "applications_clocks_setting": "c", "display_clock_setting": "c",
}  # fmt: skip


def head_lines(view: View, width: int, say: Say = english) -> list[Line]:
    """The run and its state; its numbers; and why it failed."""
    phase = f", {say(view.phase)}" if view.live and view.phase and view.phase != view.state else ""
    nodes = say("{} nodes" if len(view.nodes) != 1 else "{} node", len(view.nodes))
    count = sum(len(node.gpus) for node in view.nodes)
    gpus = say("{} GPUs" if count != 1 else "{} GPU", count) if count else ""
    away = sum(bool(node.silent) for node in view.nodes)
    silent = say("{} without an answer", away) if away else ""
    missing = say("{} not found", view.missing) if view.missing else ""
    tries = ""
    if (view.attempts or 1) > 1 and view.attempt:
        tries = say("attempt {} of {}", f"{view.attempt:.0f}", f"{view.attempts:.0f}")
    age = say("for {}" if view.live else "took {}", duration(view.age)) if view.age is not None else ""
    first = _fitting((view.run, f"{say(view.state)}{phase}", nodes, gpus, silent, missing, tries, age), width)
    style: Style = "red" if view.state in _BAD else "green" if view.state == "finished" else "bold"
    why = [Line(cut(say("why: {}", view.why), width), "red", None)] if view.why else []
    why += [Line(cut(view.slow, width), "yellow", None)] if view.slow else []
    return [Line(first, style, None), Line(_numbers(view, width, say), "", None), *why]


def _numbers(view: View, width: int, say: Say) -> str:
    """The numbers of the training, as many as fit, the most important first."""
    step = "" if view.step is None else f"{view.step:.0f}" + (f"/{view.total:.0f}" if view.total else "")
    percent = f" ({100 * min(1.0, view.step / view.total):.0f} %)" if view.step is not None and view.total else ""
    ratio = view.spent.ratio if view.spent is not None else None
    parts = (
        say("step {}", step) + percent if step else "",
        "" if view.loss is None else say("loss {}", f"{view.loss:.4g}"),
        "" if view.left is None else say("{} left", duration(view.left)),
        "" if view.tokens is None else say("{} tokens/s", f"{view.tokens:,.0f}"),
        "" if view.lr is None else say("lr {}", f"{view.lr:.3g}"),
        say("{} s/step", f"{view.pace:.3g}") if view.pace and view.pace >= 1 else "",
        say("{} ms/step", f"{view.pace * 1000:.3g}") if view.pace and view.pace < 1 else "",
        "" if ratio is None else say("{} % effective", f"{100 * ratio:.0f}"),
    )
    return _fitting(parts if any(parts) else [say("no step yet")], width)


def _fitting(parts: Iterable[str], width: int) -> str:
    """The parts up to the first one that does not fit; of the first one, as much as fits."""
    text = ""
    for part in filter(None, parts):
        if text and columns(text) + 2 + columns(part) > width:
            break
        text += f"{'  ' if text else ''}{part}"
    return cut(text, width)


# --- nodes and GPUs ------------------------------------------------------------------------------


def node_lines(view: View, width: int, height: int, say: Say = english) -> list[Line]:
    """A row for each node with its GPUs; if they do not fit, shorter ones in several columns."""
    rows = [["NODE", "RANK", "STATE", "PHASE", "STEP", "GPUS", "USE", "MEM", "TEMP", "POWER", "CLOCK", "THROTTLE"]]
    rows[0] += ["RSS", "SENT", "RECEIVED", "LOAD", "MEMORY", "DISK FREE", "SAMPLE", "PROCESSES"]
    rows += [_node_row(node, say) for node in view.nodes]
    styles: list[Style] = ["red" if node.state in _BAD or _slowed(node.gpus) else "" for node in view.nodes]
    silent = fold_equal({node.name: node.silent for node in view.nodes if node.silent})
    reasons = [Line(f"{names}: {say('no answer')}: {why}", "red", None) for why, names in silent.items()]
    if len(rows) > height and width >= 2 * (_wide_cell(view.nodes, say) + 2):
        cells = [(_cell(node, say), style) for node, style in zip(view.nodes, styles, strict=True)]
        return [*_in_columns(cells, width), *reasons]
    lines = _fitted(rows, width, say)
    return [Line(lines[0], "dim", None), *map(Line, lines[1:], styles, repeat(None)), *reasons]


def gpu_lines(view: View, width: int, _height: int = 0, say: Say = english) -> list[Line]:
    """One cell for each GPU: use, memory, temperature, power, clock, and a sign if it is slowed down."""
    cells: list[tuple[str, Style]] = [
        (_gpu_cell(node, gpu), "red" if node.silent or _slowed([gpu]) else "")
        for node in view.nodes
        for gpu in node.gpus
    ]
    if not cells:
        return [Line(say("no sample of a GPU yet: nodes without nvidia-smi have none"), "dim", None)]
    return _in_columns(cells, width)


def network_lines(view: View, width: int, _height: int = 0, say: Say = english) -> list[Line]:
    """One cell for each interface and InfiniBand port: bytes per second out of it and into it."""
    wide = max((columns(port.port) for node in view.nodes for port in node.traffic), default=0)
    out, into = say("out"), say("in")
    cells: list[tuple[str, Style]] = [
        (f"{node.name} {pad(port.port, wide)} {out} {rate(port.sent):>12} {into} {rate(port.received):>12}", "")
        for node in view.nodes
        for port in node.traffic
        if not node.silent
    ]
    if not cells:
        return [Line(say("no sample of the network yet: rates need two samples"), "dim", None)]
    return _in_columns(cells, width)


# What the pane of the nodes can show: its title and its lines.
TABLES = (
    ("nodes", node_lines),
    ("GPUs: use, memory, temperature, power, SM clock, throttling", gpu_lines),
    ("network: interfaces and InfiniBand ports", network_lines),
)


def rate(value: float | None) -> str:
    """Bytes per second."""
    return "-" if value is None else f"{size(value)}/s"


def throttling(gpus: Sequence[Gpu], say: Say = english) -> str:
    """The worst reason that slows GPUs down, with their number if it is not all of them."""
    for reason in SIGN_OF:
        count = sum(reason in gpu.throttle for gpu in gpus)
        if count:
            words = reason.replace("_", " ").replace("thermal slowdown", "thermal").replace("brake slowdown", "brake")
            return say(words) + (f" ({count})" if count < len(gpus) else "")
    return say("other") if any(gpu.throttle for gpu in gpus) else "-"


def _slowed(gpus: Sequence[Gpu]) -> bool:
    """Whether the hardware protects itself: a power cap alone is usual under load."""
    return any(reason in HARDWARE for gpu in gpus for reason in gpu.throttle)


def _node_row(node: NodeView, say: Say) -> list[str]:
    if node.silent:
        return [node.name, _show(node.rank, str), say(node.state), *["-"] * 17]
    gpus, age = node.gpus, node.age
    return [
        node.name,
        _show(node.rank, str),
        say(node.state) or "-",
        say(node.phase) or "-",
        _show(node.step, lambda value: f"{value:.0f}"),
        _bars(gpus) or "-",
        _range([gpu.use for gpu in gpus], " %"),
        _range([gpu.filled for gpu in gpus], " %"),
        _range([gpu.temperature for gpu in gpus], " C"),
        _show(_sum(gpu.power for gpu in gpus), lambda value: f"{value:.0f} W"),
        _range([gpu.clock for gpu in gpus], " MHz"),
        throttling(gpus, say),
        _show(node.rss, size),
        rate(node.sent),
        rate(node.received),
        _show(node.load, lambda value: f"{value:.1f}" + (f"/{node.cores:.0f}" if node.cores else "")),
        _show(node.memory, lambda value: f"{size(value)}/{size(node.memory_total or 0)}"),
        _show(node.disk_free, size),
        say("{} ago", span(age)) if age is not None and age > STALE and node.state == "running" else "-",
        who(node.processes) or "-",
    ]


def who(processes: Sequence[Process]) -> str:
    """The users of GPUs, each with the program of its first process and the number of its processes."""
    users: dict[str, list[Process]] = {}
    for each in processes:
        users.setdefault(each.user or "?", []).append(each)
    parts = (
        f"{user}: {program_of(mine[0]) or '?'}" + (f" ({len(mine)})" if len(mine) > 1 else "")
        for user, mine in users.items()
    )
    return ", ".join(parts)[:_USERS]


def program_of(process: Process) -> str:
    """The name of the program, without its folder and arguments: ``python train.py`` of a script."""
    words = process.command.split()
    names = [word.rpartition("/")[2] for word in words[:1] + [word for word in words[1:] if word.endswith(".py")][:1]]
    return " ".join(names)


def _cell(node: NodeView, say: Say) -> str:
    if node.silent:
        return f"{node.name} {say('no answer')}"
    use, filled = ([one for one in values if one is not None] for values in _columns_of(node.gpus))
    numbers = f" {fmean(use):3.0f}%" if use else ""
    numbers += f" {max(filled):3.0f}%" if filled else ""
    return f"{node.name} {_bars(node.gpus) or say(node.state)}{numbers}"


def _columns_of(gpus: Sequence[Gpu]) -> tuple[list[float | None], list[float | None]]:
    return [gpu.use for gpu in gpus], [gpu.filled for gpu in gpus]


def _wide_cell(nodes: Sequence[NodeView], say: Say) -> int:
    return max((columns(_cell(node, say)) for node in nodes), default=0)


def _gpu_cell(node: NodeView, gpu: Gpu) -> str:
    values = ((gpu.use, "%"), (gpu.filled, "%"), (gpu.temperature, "C"), (gpu.power, "W"))
    cells = [f"{'-' if value is None else f'{value:.0f}':>3}{unit}" for value, unit in values]
    cells += [f"{gpu.clock:>4.0f}MHz"] if gpu.clock is not None else []
    return " ".join([f"{node.name}:{gpu.index}", *cells, *(SIGN_OF.get(reason, "?") for reason in gpu.throttle[:1])])


def _in_columns(cells: Sequence[tuple[str, Style]], width: int) -> list[Line]:
    wide = max(columns(text) for text, _ in cells) + 2
    count = max(1, width // wide)
    rows = -(-len(cells) // count)
    lines = []
    for row in range(rows):
        mine = cells[row::rows]
        style: Style = next((style for _, style in mine if style), "")
        lines.append(Line("".join(pad(text, wide) for text, _ in mine).rstrip(), style, None))
    return lines


def _fitted(rows: Sequence[Sequence[str]], width: int, say: Say) -> list[str]:
    """The table without empty columns, and without those that do not fit."""
    table = {column[0]: column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])}
    shown = {name: [say(name), *cells] for name, (_, *cells) in table.items()}
    wide = {name: max(map(columns, column)) for name, column in shown.items()}
    for name in _LEAST:
        if sum(wide.values()) + 2 * (len(wide) - 1) <= width:
            break
        wide.pop(name, None)
    return [
        "  ".join(pad(cell, each) for cell, each in zip(row, wide.values(), strict=True)).rstrip()
        for row in zip(*(shown[name] for name in wide), strict=True)
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
        source = "" if rank is not None else line.node if line.rank is None else f"{line.node}/{line.rank}"
        more = f"(x {count})" if count > 1 else ""  # in front: a narrow terminal cuts the end
        text = " ".join(part for part in (time_of(line), source, more, line.text) if part)
        lines.append(Line(text, "red" if "Error" in line.text else "", None))
    return lines


def ranks_of(text: str, most: int) -> tuple[int, ...]:
    """``0 3-5`` -> 0, 3, 4, 5: at most ``most`` ranks, and nothing of what is no number."""
    found: dict[int, None] = {}
    for word in re.findall(r"[0-9]{1,6}(?:-[0-9]{1,6})?", text):
        first, _, last = word.partition("-")
        for rank in range(int(first), int(last or first) + 1)[:most]:
            found[rank] = None
    return tuple(found)[:most]


def event_lines(view: View, say: Say = english) -> list[Line]:
    """The events of the run, the newest last."""
    lines = []
    for event in view.events:
        at = clocks.strftime("%H:%M:%S", clocks.gmtime(event.time))
        style: Style = "red" if event.kind == "hang" else "yellow" if event.kind in {"warning", "restart"} else ""
        lines.append(Line(f"{at} {pad(say(event.kind), 10)} {event.node}: {_event_text(event, say)}", style, None))
    return lines or [Line(say("no event yet"), "dim", None)]


def _event_text(event: Happening, say: Say) -> str:
    """What happened. Only our own words are translated, not texts of agents."""
    if found := _ATTEMPT.fullmatch(event.text):
        if found[2] == "the start":
            return say("attempt {} from the start", found[1])
        return say("attempt {} from {}", found[1], found[2])
    return say(event.text)


# --- other runs ----------------------------------------------------------------------------------


def run_line(run: Run, current: str, say: Say = english) -> Line:
    """A run in a list of runs; ``*`` marks the one that is shown."""
    step, total = run.head.number("step"), run.head.number("total")
    at = "" if step is None else say("step {}", f"{step:.0f}" + (f"/{total:.0f}" if total else ""))
    count = say("{} nodes" if len(run.parts) != 1 else "{} node", len(run.parts))
    style: Style = "red" if run.state in _BAD else "green" if run.state == "finished" else "bold" if run.live else ""
    mark = "*" if run.id == current else " "
    return Line(f"{mark} {clean(run.id)}  {pad(say(run.state), 10)}  {pad(count, 10)}  {at}".rstrip(), style, None)
