"""Whole logs without numbers of a training yield nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.reader import read

CORPUS = Path(__file__).parent / "reader_corpus"
NONE = sorted((CORPUS / "none").glob("*.log"))


def readings(path: Path):
    return list(read([path.read_bytes()]))


@pytest.mark.parametrize("path", NONE, ids=lambda path: path.stem)
def test_a_log_without_a_training_yields_nothing(path):
    assert readings(path) == []
