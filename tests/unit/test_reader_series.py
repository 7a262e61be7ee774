"""Readings as a series: steps of several lines, of resumed runs and of ranks, and lines without steps."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.reader import Reading, Resume, Row, as_csv, series


def losses(*steps, source="nanogpt", add=0.0, rank=None):
    return [Reading(step, loss=step + add, source=source, rank=rank) for step in steps]


def reported(found):
    return {row.step: row.loss for row in found}


def test_lines_about_one_step_make_one_row():
    found = series(
        [
            Reading(10, lr=0.1, source="deepspeed", rank=0),
            Reading(10, ms=5.0, source="deepspeed", rank=0),
            Reading(10, loss=2.0, grad_norm=1.0, total=90, source="trainer"),
            Reading(10, eval_loss=3.0, source="trainer"),
        ]
    )
    assert list(found) == [Row(10, loss=2.0, lr=0.1, grad_norm=1.0, ms=5.0, eval_loss=3.0)]
    assert (found.total, found.resumes, found.sources) == (90, (), {"deepspeed", "trainer"})


def test_last_reading_of_a_step_is_used_and_later_steps_of_before_are_dropped():
    found = series([*losses(10, 20, 30, 40), *losses(25, 30, add=0.5)])
    assert reported(found) == {10: 10, 20: 20, 25: 25.5, 30: 30.5}
    assert found.resumes == (Resume(after=40, at=25),)


def test_every_resume_is_kept():
    found = series([*losses(1, 2, 3), *losses(2, 3, 4, add=0.1), *losses(1, 2, add=0.2)])
    assert reported(found) == {1: 1.2, 2: 2.2}
    assert found.resumes == (Resume(3, 2), Resume(4, 1))


def test_a_source_that_is_behind_another_one_is_no_resume():
    found = series([*losses(1, 2, 3), Reading(1, ms=5.0, source="deepspeed"), Reading(2, ms=6.0, source="deepspeed")])
    assert [(row.step, row.loss, row.ms) for row in found] == [(1, 1, 5.0), (2, 2, 6.0), (3, 3, None)]
    assert found.resumes == ()


def test_resume_resets_the_other_sources():
    times = [Reading(step, ms=7.0, source="deepspeed") for step in (2, 3)]
    before = [Reading(step, ms=5.0, source="deepspeed") for step in (1, 2, 3)]
    found = series([*losses(1, 2, 3), *before, *losses(2, add=0.5), *times, *losses(3, add=0.5)])
    assert [(row.step, row.loss, row.ms) for row in found] == [(1, 1, 5.0), (2, 2.5, 7.0), (3, 3.5, 7.0)]
    assert found.resumes == (Resume(3, 2),)


def test_repeated_step_is_no_resume():
    """Ranks without a number in their lines, or a last line with a summary."""
    found = series([*losses(1, 2), *losses(2, add=0.5), Reading(2, eval_loss=3.0, source="nanogpt"), *losses(3)])
    assert [(row.step, row.loss, row.eval_loss) for row in found] == [(1, 1, None), (2, 2.5, 3.0), (3, 3, None)]
    assert found.resumes == ()


def test_nan_is_kept_and_differs_from_a_missing_value():
    found = list(series([Reading(1, loss=math.nan, lr=math.inf, source="trainer")]))
    assert math.isnan(found[0].loss)
    assert found[0].lr == math.inf
    assert found[0].grad_norm is None


def test_each_rank_has_separate_rows_and_the_lowest_with_a_loss_is_shown():
    readings = [
        Reading(1, ms=9.0, source="deepspeed", rank=0),
        *losses(1, 2, rank=3),
        *losses(1, 2, rank=2, add=0.5),
    ]
    found = series(readings)
    assert (found.rank, found.ranks, reported(found)) == (2, (0, 2, 3), {1: 1.5, 2: 2.5})
    assert reported(series(readings, rank=3)) == {1: 1, 2: 2}
    assert list(series(readings, rank=7)) == []


def test_reading_without_a_rank_belongs_to_rank_0():
    found = series([*losses(1), Reading(1, ms=9.0, source="deepspeed", rank=0)])
    assert list(found) == [Row(1, loss=1, ms=9.0)]


def test_readings_without_steps_are_numbered():
    readings = [Reading(eval_loss=9.0), Reading(loss=5.0), Reading(loss=4.0), Reading(eval_loss=4.5), Reading(ms=3.0)]
    found = series(readings)
    assert found.counted
    assert [(row.step, row.loss, row.eval_loss) for row in found] == [(0, None, 9.0), (1, 5.0, None), (2, 4.0, 4.5)]
    assert not series([*readings, *losses(7)]).counted


def test_empty_series():
    found = series([])
    assert (len(found), list(found), found.ranks, found.total, found.counted, found.last(3)) == (
        0,
        [],
        (),
        None,
        False,
        [],
    )


def test_the_last_rows():
    found = series(losses(*range(100)))
    assert [row.step for row in found.last(3)] == [97, 98, 99]
    assert found.last(200) == list(found)


@settings(deadline=None)
@given(st.lists(st.integers(0, 30)), st.lists(st.integers(0, 30)))
def test_steps_rise_and_each_has_its_last_value(one, other):
    readings = losses(*one, source="a") + losses(*other, source="b", add=0.5)
    found = list(series(readings))
    steps = [row.step for row in found]
    assert steps == sorted(set(steps))
    last = {step: step + 0.5 for step in after(other)}
    last.update({step: float(step) for step in after(one)})  # the source that spoke first counts
    assert {row.step: row.loss for row in found} == last


def after(steps):
    """Those that no later one goes back to or behind."""
    return [step for place, step in enumerate(steps) if all(later >= step for later in steps[place:])]


def test_two_logs_of_a_resumed_run_give_one_resume():
    lines = [*losses(1, 2, 3), *losses(2, 3, 4, add=0.25)]
    records = [
        each._replace(source="trainer_log", grad_norm=1.0)
        for each in [*losses(1, 2, 3), *losses(2, 3, add=0.2501), Reading(5, loss=5.0)]
    ]
    found = series([*lines, *records])
    assert [(row.step, row.loss, row.grad_norm) for row in found] == [
        (1, 1, 1.0),
        (2, 2.25, 1.0),
        (3, 3.25, 1.0),
        (4, 4.25, None),
        (5, 5.0, 1.0),
    ]
    assert found.resumes == (Resume(3, 2),)
    assert len(found) == 5
    assert found.last(2) == list(found)[-2:]


def test_a_step_takes_less_than_200_bytes():
    tracemalloc.start()
    try:
        found = series(Reading(step, loss=1.5, lr=0.1, ms=2.5, source="nanogpt") for step in range(50_000))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 50_000
    assert kept < 200 * 50_000


@pytest.mark.parametrize(("counted", "name"), [(False, "step"), (True, "line")])
def test_csv(counted, name):
    rows = [Row(1, loss=math.nan, lr=1e-05), Row(2, eval_loss=2.5, tokens_per_second=math.inf)]
    assert list(as_csv(rows, counted)) == [
        f"{name},loss,lr,grad_norm,ms,tokens_per_second,eval_loss",
        "1,nan,1e-05,,,,",
        "2,,,,,inf,2.5",
    ]
