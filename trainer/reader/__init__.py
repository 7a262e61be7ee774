"""Reads what trainers log. The code lies in the agent's folder, ``trainer/agent/reader``: it travels with a run."""

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
