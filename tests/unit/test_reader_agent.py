"""The agent and ``diagnose`` read trainers' logs by the same code."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from reader_logs import data, readings

import trainer.reader
from provision.diagnosis import reading
from trainer.agent import reader
from trainer.agent.supervisor.output import Progress

AGENT = Path(__file__).parents[2] / "trainer" / "agent"


def test_both_names_are_the_same_code():
    assert Path(reader.__file__) == AGENT / "reader" / "__init__.py"
    assert set(reader.__all__) == set(trainer.reader.__all__)
    for name in reader.__all__:
        assert getattr(reader, name).__class__ is getattr(trainer.reader, name).__class__, name


@pytest.mark.parametrize("log", ["llamafactory.jsonl", "gpt.jsonl"])
def test_the_agent_reports_the_lines_of_the_trainers_log(tmp_path, log):
    path = tmp_path / "trainer_log.jsonl"
    progress = Progress(path)
    path.write_bytes(data(log))
    reported = list(progress.events())
    json.dumps(reported, allow_nan=False)
    fields = ("step", "total", "loss", "lr", "grad_norm", "tokens_per_second", "eval_loss")
    reported = [[each.get(name) for name in fields] for each in reported if each.keys() - {"step", "total", "epoch"}]
    assert reported == [[getattr(each, name) for name in fields] for each in readings(data(log))]


def test_nan_is_null_in_events_and_is_read_back(tmp_path):
    path = tmp_path / "trainer_log.jsonl"
    progress = Progress(path)
    path.write_text('{"current_steps": 3, "loss": NaN}\n')
    (reported,) = progress.events()
    assert reported == {"step": 3, "loss": None}
    event = json.dumps({"event": "progress", "time": 1.5, "attempt": 1, **reported})
    (line,) = reader.parse_all(event)
    assert math.isnan(line.values["loss"])


def test_diagnose_reads_the_same_values_from_a_run_log():
    lines = reading.log_lines(data("gpt.log").decode(), "node01")
    reported = [(each["step"], each.get("loss"), each.get("eval_loss")) for each in reading.progress(lines)]
    assert reported == [(each.step, each.loss, each.eval_loss) for each in readings(data("gpt.log"))]
