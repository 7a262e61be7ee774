"""Steps of transformers' lines whose bar is in another stream, and of those without a bar."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.reader.apart import Bars, Pace, Steps, pace
from trainer.agent.supervisor.numbers import Numbers
from trainer.reader import Reading

LOGS = Path(__file__).with_name("recorded_logs")
OUT, ERR = ((LOGS / f"trainer_apart.{each}").read_bytes() for each in ("out", "err"))
HISTORY = [  # as the Trainer itself keeps it
    (entry["step"], round(entry.get("loss", entry.get("eval_loss")), 2))
    for entry in json.loads((LOGS / "trainer_bar.json").read_text())["log_history"]
    if "loss" in entry or "eval_loss" in entry
]


def readings(*parts, argv=(), start=0, close=True):
    """The readings of (stream, bytes) of rank 0, in this order."""
    found = []
    numbers = Numbers(lambda _, reading: found.append(reading), argv=argv, start=start)
    for stream, data in parts:
        numbers.feed(stream, 0, data)
    if close:
        numbers.close()
    return found


def steps(found):
    return [(each.step, round(each.loss if each.loss is not None else each.eval_loss, 2)) for each in found]


def pieces(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


@given(st.integers(1, 4000), st.integers(1, 4000), st.booleans())
def test_each_line_gets_the_step_that_the_trainer_keeps(out_size, err_size, first):
    out = [("out", each) for each in pieces(OUT, out_size)]
    err = [("err", each) for each in pieces(ERR, err_size)]
    mixed = [each for pair in zip(out, err, strict=False) for each in (pair if first else pair[::-1])]
    both = min(len(out), len(err))
    found = readings(*mixed, *out[both:], *err[both:])
    assert steps(found) == HISTORY
    assert {each.total for each in found} == {32}


def test_bars_of_other_work_count_for_no_line():
    line = b"{'loss': '2.5', 'epoch': '0.5'}\n"
    others = (
        b"\r          \rMap:  50%|#####     | 5/10 [00:00<00:00, 9it/s]",  # has a title
        b"\r  10%|#         | 1/10 [00:00<00:00, 9it/s]",  # was not drawn again for a line
        b"\n\r          \r\x1b[A\r  10%|#         | 1/10 [00:00<00:00, 9it/s]",  # follows the end of a lower bar
        b"\r          \r\r   0%|          | 0/10 [00:00<?, ?it/s]",  # an evaluation before the first step
    )
    for other in others:
        assert [each.step for each in readings(("err", other), ("out", line))] == [None], other
    own = b"\r          \r\r  10%|#         | 1/10 [00:00<00:00, 9it/s]"
    assert [each.step for each in readings(("err", own), ("out", line))] == [1]


def test_bars_of_other_ranks_count_for_no_line():
    found = []
    numbers = Numbers(lambda rank, reading: found.append((rank, reading.step)))
    numbers.feed("err1", 1, b"\r     \r\r  10%|#    | 1/10 [00:00<00:00, 9it/s]")
    numbers.feed("out0", 0, b"{'loss': '2.5', 'epoch': '0.5'}\n")
    numbers.close()
    assert found == [(0, None)]


def line(epoch, **values):
    return Reading(loss=values.pop("loss", 2.0), epoch=epoch, source="trainer", **values)


def test_lines_that_a_program_writes_between_are_recognized_by_the_epoch():
    found = Steps()
    for step in (10, 13, 20, 30):  # 13: the program's own line
        found.bar(step, 100)
    assert [each.step for epoch in (0.1, 0.2, 0.3) for each in found.line(line(epoch))] == [10, 20, 30]


def test_line_whose_bar_is_missing_has_no_step():
    found = Steps()
    for step in (10, 30):
        found.bar(step, 100)
    assert [each.step for epoch in (0.1, 0.2, 0.3) for each in found.line(line(epoch))] == [10, None, 30]


def test_second_training_of_a_process_counts_from_its_own_bar():
    found = Steps()
    seen = []
    for total, step, epoch in ((20, 10, 0.5), (20, 20, 1.0), (40, 20, 0.5), (40, 40, 1.0)):
        seen += [*found.bar(step, total), *found.line(line(epoch))]
    assert [(each.step, each.total) for each in seen] == [(10, 20), (20, 20), (20, 40), (40, 40)]


def test_line_waits_for_its_bar_only_for_a_while():
    found = Steps()
    assert found.line(line(0.5)) == []
    waited = [found.look() for _ in range(9)]
    assert [len(each) for each in waited] == [0] * 8 + [1]
    assert waited[-1][0].step is None
    assert found.bar(10, 100) == []
    assert [each.step for each in found.line(line(1.0))] == [None]  # the bar may have been the other line's


def test_lines_are_counted_if_only_other_bars_are_drawn():
    found = readings(
        ("err", b"\r100%|#####| 3/3 [00:00<00:00, 9it/s]\n"),
        *(("out", b"{'loss': '2.5', 'epoch': '0.%d'}\n" % each) for each in (1, 2, 3)),
        argv=("--logging_steps", "10"),
    )
    assert [each.step for each in found] == [None, 20, 30]


def test_a_skipped_part_ends_the_pairing():
    found = Steps()
    found.bar(10, 100)
    assert [each.step for each in found.line(line(0.1))] == [10]
    assert found.skip() == []
    found.bar(20, 100)
    assert [each.step for each in found.line(line(0.2))] == [None]


def test_bars_that_no_line_takes_are_bounded():
    found = Steps()
    for step in range(1, 6000):
        found.bar(step, 10**6)
    assert [each.step for each in found.line(line(0.2))] == [None]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("train.py --logging_steps 5 --max_steps 100", Pace(5, 7, 100)),
        ("train.py --logging-steps=5", Pace(5, 7)),
        ("train.py --logging_steps 5 --logging_steps 6 --max_steps -1", Pace(6, 7)),
        ("train.py", None),
        ("train.py --logging_steps", None),
        ("train.py --logging_steps 0.1", None),
        ("train.py --logging_steps 0", None),
        ("train.py --logging_steps 5 --logging_first_step", None),
        ("train.py --logging_steps 5 --logging_strategy epoch", None),
    ],
)
def test_pace_of_a_command_line(words, found):
    assert pace(words.split(), 7) == found


def counted(words, epochs, start=0):
    parts = [("out", b"{'loss': '2.5', 'epoch': '%s'}\n" % format(epoch, ".4g").encode()) for epoch in epochs]
    return [each.step for each in readings(*parts, argv=words.split(), start=start)]


def test_without_a_bar_lines_are_counted_from_the_second_on():
    assert counted("x --logging_steps 1", [each / 23 for each in range(1, 40)]) == [None, *range(2, 40)]
    assert counted("x --logging_steps 5", [each / 230 for each in range(5, 40, 5)]) == [None, *range(10, 40, 5)]
    assert counted("x --logging_steps 1", [each / 23 for each in range(41, 60)], start=40) == [None, *range(42, 60)]
    assert counted("x --logging_steps 5", [each / 23 for each in range(45, 60, 5)], start=42) == [None, 50, 55]


def test_lines_that_contradict_the_pace_get_no_step():
    """The program found a checkpoint itself, ignored the one that it was given, or a line is missing."""
    assert set(counted("x --logging_steps 1", [each / 23 for each in range(21, 60)])) == {None}
    assert set(counted("x --logging_steps 1", [each / 23 for each in range(1, 60)], start=40)) == {None}
    assert counted("x --logging_steps 10", [1, 2, 3, 5, 6]) == [None, 20, 30, None, None]
    assert set(counted("x", [each / 23 for each in range(1, 60)])) == {None}


def test_an_evaluation_belongs_to_the_step_before_it():
    text = b"".join(
        b"{'loss': '2.5', 'epoch': '%d'}\n{'eval_loss': '2.4', 'epoch': '%d'}\n" % (each, each) for each in (1, 2, 3)
    )
    found = readings(("out", text), argv=("--logging_steps", "10", "--max_steps", "40"))
    assert [(each.step, each.total) for each in found[2:]] == [(20, 40), (20, 40), (30, 40), (30, 40)]


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_are_read(data, size):
    bars = Bars()
    for each in pieces(b"\r   \r" + data, size):
        bars.feed(each)
