"""The keys of ``clusterctl monitor``: the help behind ``?``, and the line at the bottom."""

from __future__ import annotations

from provision.output_text import Line
from provision.summaries.words import Say, columns, cut, pad

_LEFT = 40  # columns of the left half of the table

KEYS = (
    ("q", "quit; the run continues"),
    ("n", "list of runs, to see another"),
    ("s", "stop the run (asks)"),
    ("w", "save a checkpoint, and continue"),
    ("S", "save a checkpoint and stop (asks)"),
    ("d", "diagnosis; there, c copies it"),
    ("g", "nodes, single GPUs, or network"),
    ("c", "copy the diagnosis"),
    ("r", "log of the next rank, R: of all"),
    ("p", "logs of several ranks, such as 0 3-5"),
    ("/", "search the logs; Escape ends it"),
    ("e", "log or events (narrow terminals)"),
    ("?", "this help"),
    ("Tab", "next pane; arrow keys scroll"),
)
NOTES = (
    "GPUS has a sign for the use of each GPU. USE, MEM and TEMP are ranges over",
    "the GPUs of a node, POWER is their sum. Agents take a sample every 10 s.",
    "A GPU that is slowed down has a sign: T, t heat; B power brake; p power cap;",
    "H hardware; c clocks set; s sync boost.",
    "A log line with (x N) stands for N lines that differ only in their numbers.",
    "Below a curve: R restart, H hang, C checkpoint, ! warning. Times are UTC.",
)
_HINTS = (  # the most important first
    ("q", "quit"),
    ("?", "help"),
    ("s", "stop"),
    ("w", "save"),
    ("d", "diagnosis"),
    ("n", "runs"),
    ("r", "rank"),
    ("/", "search"),
    ("g", "GPUs"),
    ("e", "events"),
    ("p", "panes"),
)


def help_lines(say: Say) -> list[Line]:
    """What every key does, and what the signs mean."""
    cells = [f"{key:<2} {say(text)}" for key, text in KEYS]
    rows = [
        pad(left, _LEFT) + right if columns(left) < _LEFT else f"{left} {right}"
        for left, right in zip(cells[::2], cells[1::2], strict=True)
    ]
    return [Line(text, "", None) for text in (*rows, "", *map(say, NOTES))]


def hint_line(width: int, say: Say) -> Line:
    """The keys, as many as fit."""
    text = ""
    for key, name in _HINTS:
        more = f"{'  ' if text else ''}{key} {say(name)}"
        if columns(text + more) > width:
            break
        text += more
    return Line(cut(text, width), "dim", None)
