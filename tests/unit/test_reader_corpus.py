"""Whole logs: those without numbers of a training yield nothing, those of known trainers exactly their numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.reader import read

CORPUS = Path(__file__).parent / "reader_corpus"
NONE = sorted((CORPUS / "none").glob("*.log"))
SOME = sorted((CORPUS / "some").glob("*.json"))


def readings(path: Path):
    return list(read([path.read_bytes()]))


@pytest.mark.parametrize("path", NONE, ids=lambda path: path.stem)
def test_a_log_without_a_training_yields_nothing(path):
    assert readings(path) == []


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_a_log_of_a_trainer_yields_its_numbers(path):
    expected = json.loads(path.read_text(encoding="utf-8"))
    found = [[each.step, each.loss, each.eval_loss] for each in readings(path.with_suffix(".log"))]
    assert expected["source"]
    assert found == expected["readings"]
