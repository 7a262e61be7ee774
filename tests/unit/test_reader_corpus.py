"""Whole logs: every format yields its steps and numbers, and logs without numbers of a training yield nothing.

A folder of ``reader_corpus`` is a format, as the project's own code writes it; ``expected.json`` has its numbers.
``none`` has logs of other programs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from case_table import every_case

from trainer.reader import FIELDS, read, series

CORPUS = Path(__file__).parent / "reader_corpus"
NONE = sorted((CORPUS / "none").glob("*.log"))
FORMATS = sorted(path.parent for path in CORPUS.glob("*/expected.json"))
COMPARED = ("loss", "eval_loss")  # must be absent where the log has none; the other numbers may be derived


@every_case("path", NONE, ids=lambda path: path.stem)
def test_a_log_without_a_training_yields_nothing(path):
    assert list(read([path.read_bytes()])) == []


@every_case("folder", FORMATS, ids=lambda path: path.name)
@every_case("size", [1 << 20, 100])
def test_a_training_yields_its_numbers(folder, size):
    text, expected = (folder / "train.log").read_bytes(), json.loads((folder / "expected.json").read_text())
    found = series(read(text[start : start + size] for start in range(0, len(text), size)))
    rows = {row.step: row for row in found}
    assert (list(rows), found.total) == ([row["step"] for row in expected["rows"]], expected["total"])
    assert (found.counted, found.resumes) == (expected["counted"], ())
    for wanted in expected["rows"]:
        row = rows[wanted["step"]]
        values = {name: getattr(row, name) for name in FIELDS if name in wanted or name in COMPARED}
        assert {name: value for name, value in values.items() if value is not None} == pytest.approx(
            {name: value for name, value in wanted.items() if name != "step"}
        )


def test_the_corpus_is_large():
    assert len(NONE) >= 100
    assert len(FORMATS) >= 50
