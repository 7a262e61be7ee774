"""Reads the logs of trainers: steps, losses, learning rates, times. Pure, and the only place that knows the formats.

- ``formats``: the values in a single line
- ``general``: the values in a line of any other program, and the steps of its log
- ``tables``: formats over several lines: tables with a header, ``trainer_state.json``
- ``stream``: the readings of a log of any size, and the series of a run, each step once
- ``apart``: the steps of transformers' lines whose progress bar is in another stream, or disabled
- ``scalars``: TensorBoard's event files

It is in the agent's folder because the agent needs it on the nodes. Other code imports ``trainer.reader``.
"""

from .formats import MARKS, LogLine, parse_all, parse_line
from .stream import FIELDS, Reader, Reading, Resume, Row, Series, as_csv, read, series

__all__ = [
    "FIELDS",
    "MARKS",
    "LogLine",
    "Reader",
    "Reading",
    "Resume",
    "Row",
    "Series",
    "as_csv",
    "parse_all",
    "parse_line",
    "read",
    "series",
]
