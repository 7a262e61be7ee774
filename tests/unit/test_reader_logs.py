"""Readings of recorded logs of real trainers, step by step."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for reader_logs; last, so that it hides no module

from reader_logs import FOLDER, LOGS, column, data, readings, rows

from trainer.reader import Resume, series


def kept():
    """The Trainer's own account of ``trainer_bar.log``: step and name of each value."""
    history = json.loads((FOLDER / "trainer_bar.json").read_text())["log_history"]
    return {name: {each["step"]: each[name] for each in history if name in each} for name in ("loss", "eval_loss")}


def test_the_trainers_steps_are_those_of_its_progress_bar():
    found = series(readings(data("trainer_bar.log")))
    assert (found.total, found.counted, found.resumes, found.ranks) == (32, False, (), (0,))
    for name, values in kept().items():
        assert column("trainer_bar.log", name) == pytest.approx(values, rel=1e-3)
    assert column("trainer_bar.log", "lr")[32] == 3.125e-05
    assert column("trainer_bar.log", "grad_norm")[2] == pytest.approx(1.928)
    assert all(ms > 0 for ms in column("trainer_bar.log", "ms").values())


def test_a_trainer_that_resumes_names_its_steps_too():
    losses = kept()["loss"]
    assert column("trainer_resumed.log", "loss") == pytest.approx(
        {step: loss for step, loss in losses.items() if step > 20}, rel=1e-3
    )


def test_without_a_bar_lines_are_counted_by_the_logging_steps_that_the_log_names():
    losses = kept()["loss"]
    found = series(readings(data("trainer_plain.log")))
    assert {row.step: row.loss for row in found} == pytest.approx(losses, rel=1e-3)
    assert found.resumes == (Resume(after=32, at=22),)


def test_without_a_bar_and_logging_steps_readings_have_no_step():
    text = data("trainer_plain.log").replace(b"logging_steps=", b"logging_steps ")
    reported = readings(text)
    assert len(reported) == 28
    assert [each.step for each in reported if each.loss is not None] == [None] * 22
    found = series(reported)
    assert found.counted
    assert [row.step for row in found] == list(range(1, 23))
    assert [row.step for row in found if row.eval_loss is not None] == [5, 10, 15, 16, 21, 22]


def test_lines_are_counted_by_the_logging_steps_that_are_given():
    text = data("trainer_plain.log").replace(b"logging_steps=", b"logging_steps ")
    assert series(readings(text, logging_steps=2)).last(16) == rows("trainer_plain.log")


def test_missing_line_ends_the_counting():
    lines = data("trainer_plain.log").split(b"\n")
    broken = [line for line in lines if b"'epoch': '0.125'" not in line]
    assert len(broken) == len(lines) - 1
    steps = [each.step for each in readings(b"\n".join(broken)) if each.loss is not None]
    assert steps[:2] == [2, None]
    assert set(steps[2:15]) == {None}
    assert steps[15:] == [22, 24, 26, 28, 30, 32]  # a resumed training names its step


@pytest.mark.parametrize("log", ["trainer_nan.log", "nanogpt_nan.log"])
def test_losses_that_are_nan_are_kept(log):
    losses = column(log, "loss")
    first = 12 if log == "trainer_nan.log" else 1
    assert all(math.isnan(loss) == (step >= first) for step, loss in losses.items())
    assert sum(map(math.isnan, losses.values())) > 10
    assert math.isnan(list(column(log, "eval_loss").values())[-1])


def test_lines_that_torchrun_joins_by_ranks_name_no_step():
    reported = readings(data("trainer_tee.log"))
    assert {(each.step, each.rank) for each in reported} == {(None, 0)}
    assert len([each for each in reported if each.loss is not None]) == 8


@pytest.mark.parametrize(("log", "digits"), [("llamafactory.log", 1e-3), ("llamafactory.jsonl", 0)])
def test_both_logs_of_llamafactory_give_the_same_readings(log, digits):
    found = series(readings(data(log)))
    assert (found.resumes, found.total) == ((Resume(after=28, at=18),), 28)
    exact = {each["current_steps"]: each for each in map(json.loads, data("llamafactory.jsonl").splitlines())}
    losses = {row.step: row.loss for row in found}
    assert list(losses) == list(range(2, 29, 2))
    assert losses[26] == pytest.approx(exact[26]["loss"], rel=digits)
    assert [row.step for row in found if row.eval_loss is not None] == [8, 16, 24, 28]
    assert all(row.tokens_per_second > 1000 for row in found)


def test_grad_norm_of_llamafactory_is_only_in_its_printed_log():
    assert len(column("llamafactory.log", "grad_norm")) == 14
    assert column("llamafactory.jsonl", "grad_norm") == {}


def test_deepspeeds_times_belong_to_the_step_before_them():
    reported = rows("deepspeed.log")
    assert [row.step for row in reported] == [2, 4, 6]
    assert reported[1].lr == pytest.approx(1e-3 * 4 / 6, rel=1e-3)
    whole = [line for line in data("deepspeed.log").decode().split("\n") if "| fwd: " in line]
    times = dict(part.split(": ") for part in whole[3].split(" | ")[1:])
    assert reported[1].ms == pytest.approx(sum(float(times[name]) for name in ("fwd", "bwd", "step")), abs=1e-6)
    assert {each.rank for each in readings(data("deepspeed.log")) if each.step} <= {0, None}


def test_nanogpt():
    found = series(readings(data("nanogpt.log")))
    assert [row.step for row in found] == list(range(31))
    assert found.resumes == (Resume(after=24, at=20),)
    assert list(column("nanogpt.log", "eval_loss")) == [0, 10, 20, 30]
    last = found.last(1)[0]
    assert f"iter 30: loss {last.loss:.4f}, time {last.ms:.2f}ms" in data("nanogpt.log").decode()
    assert last.tokens_per_second == pytest.approx(128 / last.ms * 1e3)  # 128 tokens an iteration


def test_both_logs_of_the_gpt_trainer_give_the_same_readings():
    lines, records = series(readings(data("gpt.log"))), series(readings(data("gpt.jsonl")))
    assert lines.resumes == records.resumes == (Resume(after=6, at=4),)
    assert [row.step for row in lines] == [row.step for row in records] == list(range(1, 9))
    for line, record in zip(lines, records, strict=True):
        for message, exact in zip(line, record, strict=True):
            assert message == exact if exact is None else message == pytest.approx(exact, rel=3e-3)
    assert None not in lines.last(1)[0]


@pytest.mark.parametrize("log", LOGS)
def test_no_reading_is_empty(log):
    for each in readings(data(log)):
        assert any(value is not None for value in each[1:7]), each
        assert each.source
