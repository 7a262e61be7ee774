"""Reads what trainers log: steps, losses, learning rates, times. Pure, and the only place that knows their formats.

- ``formats``: what a single line tells
- ``stream``: a log of any size, line by line or in blocks
- ``series``: the readings of a run, each step once

It lies in the agent's folder because the agent must have it where nothing else is; ``trainer.reader`` is its name for
everybody else. Its own imports are relative, so that it is the same under both names.
"""

from .formats import MARKS, Said, every, said, step
from .series import Resume, Row, Series, as_csv, series
from .stream import FIELDS, Reader, Reading, read

__all__ = [
    "FIELDS",
    "MARKS",
    "Reader",
    "Reading",
    "Resume",
    "Row",
    "Said",
    "Series",
    "as_csv",
    "every",
    "read",
    "said",
    "series",
    "step",
]
