"""Reads the logs of trainers: steps, losses, learning rates, times. Pure, and the only place that knows the formats.

- ``formats``: the values in a single line
- ``stream``: a log of any size, line by line or in blocks
- ``series``: the readings of a run, each step once

It is in the agent's folder because the agent needs it on the nodes. Other code imports ``trainer.reader``.
"""

from .formats import MARKS, LogLine, parse_all, parse_line, step
from .series import Resume, Row, Series, as_csv, series
from .stream import FIELDS, Reader, Reading, read

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
    "step",
]
