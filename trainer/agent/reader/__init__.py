"""Reads the logs of trainers: steps, losses, learning rates, times. Pure, and the only place that knows the formats.

- ``formats``: the values in a single line
- ``general``: the values in a line of any other program; ``names``: what its names stand for; ``places``: the steps of
  its log
- ``tables``: formats over several lines: tables with a header, ``trainer_state.json``
- ``pattern``: the values in the lines that the user's own pattern matches
- ``stream``: the readings of a log of any size, and the series of a run, each step once
- ``apart``: the steps of transformers' lines whose progress bar is in another stream, or disabled
- ``scalars``: TensorBoard's event files

It is in the agent's folder because the agent needs it on the nodes. Other code imports ``trainer.reader``.
"""

from .formats import MARKS, LogLine, parse_all
from .pattern import Pattern, PatternError
from .stream import FIELDS, Reader, Reading, Resume, Row, Series, as_csv, read, series

__all__ = [
    "FIELDS",
    "MARKS",
    "LogLine",
    "Pattern",
    "PatternError",
    "Reader",
    "Reading",
    "Resume",
    "Row",
    "Series",
    "as_csv",
    "parse_all",
    "read",
    "series",
]
