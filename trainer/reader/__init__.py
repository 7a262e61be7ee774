"""Reads the logs of trainers. The code is in ``trainer/agent/reader``, because the agent needs it on the nodes."""

from trainer.agent.reader import (
    FIELDS,
    MARKS,
    Reader,
    Reading,
    Resume,
    Row,
    Said,
    Series,
    as_csv,
    every,
    read,
    said,
    series,
    step,
)

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
