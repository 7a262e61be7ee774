"""Reads the logs of trainers. The code is in ``trainer/agent/reader``, because the agent needs it on the nodes."""

from trainer.agent.reader import (
    FIELDS,
    MARKS,
    LogLine,
    Pattern,
    PatternError,
    Reader,
    Reading,
    Resume,
    Row,
    Series,
    as_csv,
    parse_all,
    read,
    series,
)

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
