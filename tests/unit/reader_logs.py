"""The recorded logs of trainers, and helpers of the tests that read them."""

from __future__ import annotations

from pathlib import Path

from trainer.reader import read, series

FOLDER = Path(__file__).parent / "recorded_logs"
LOGS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in {".log", ".jsonl"})


def data(name):
    return (FOLDER / name).read_bytes()


def readings(content, block=None, **options):
    """Of bytes, in blocks of so many."""
    block = block or max(1, len(content))
    return list(read((content[at : at + block] for at in range(0, len(content), block)), **options))


def rows(name, **options):
    return list(series(readings(data(name)), **options))


def column(name, field, **options):
    """The values of a field by step, where it has one."""
    return {row.step: getattr(row, field) for row in rows(name, **options) if getattr(row, field) is not None}
