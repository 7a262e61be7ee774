"""Logs as they come: torn, in blocks of any size, by several ranks, with progress bars, without an end."""

from __future__ import annotations

import random
import re
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for reader_logs; last, so that it hides no module

from reader_logs import FOLDER, LOGS, data, readings

from trainer.agent.reader.stream import LIMIT
from trainer.reader import Reader, Reading, read, series

WHOLE = {log: readings(data(log)) for log in LOGS}
BAR = " 10%%|#         | %d/900 [00:01<00:09, 31.92it/s]"


@settings(deadline=None)
@given(st.sampled_from(LOGS), st.integers(1, 400))
def test_the_size_of_the_blocks_does_not_matter(log, block):
    assert repr(readings(data(log), block)) == repr(WHOLE[log])


@pytest.mark.parametrize("log", LOGS)
def test_file_lines_and_text_give_the_same_readings(log):
    with (FOLDER / log).open("rb") as file:
        assert repr(list(read(file))) == repr(WHOLE[log])
    assert repr(list(read(data(log).decode().splitlines(keepends=True)))) == repr(WHOLE[log])
    with (FOLDER / log).open(encoding="utf-8", newline="") as text:
        assert repr(list(read(text))) == repr(WHOLE[log])


@settings(deadline=None)
@given(st.sampled_from(LOGS), st.data())
def test_truncated_log_gives_the_first_readings(log, draw):
    content = data(log)
    reported = readings(content[: draw.draw(st.integers(0, len(content)))])
    assert repr(reported[:-1]) == repr(WHOLE[log][: len(reported[:-1])])
    if (
        reported
    ):  # of the last line the state of the bar that has its step may be missing, and its pace and total with it
        last, whole = reported[-1], WHOLE[log][len(reported) - 1]
        assert repr(last) in {repr(whole), repr(whole._replace(step=None, ms=None, total=None))}


@settings(deadline=None)
@given(st.sampled_from(LOGS), st.data())
def test_log_without_its_start_gives_no_other_readings(log, draw):
    """But for what stood there: whose line was torn, the tokens or examples of a step, the count of lines."""
    content = data(log)
    reported = readings(content[draw.draw(st.integers(0, len(content))) :])
    values = {repr((each.loss, each.lr, each.grad_norm, each.eval_loss)) for each in WHOLE[log]}
    steps = {each.step for each in WHOLE[log]} | {None}
    for each in reported:
        assert repr((each.loss, each.lr, each.grad_norm, each.eval_loss)) in values
        assert each.step in steps


@settings(deadline=None)
@given(st.sampled_from(["nanogpt.log", "gpt.log", "gpt.jsonl", "llamafactory.jsonl", "deepspeed.log"]), st.data())
def test_lines_of_ranks_may_come_in_any_order(log, draw):
    lines = data(log).decode().replace("[Rank 0] ", "").splitlines()
    order = draw.draw(st.lists(st.integers(0, 2), min_size=len(lines), max_size=3 * len(lines)))
    left = {rank: list(lines) for rank in range(3)}
    order += [rank for rank in range(3) for _ in lines]
    reported = list(read(f"[default{rank}]:{left[rank].pop(0)}\n" for rank in order if left[rank]))
    alone = list(read(line + "\n" for line in lines))
    for rank in range(3):
        mine = [each._replace(rank=None) for each in reported if each.rank == rank]
        assert mine == alone
        assert list(series(mine)) == list(series(reported, rank))


@settings(deadline=None)
@given(st.sampled_from(["nanogpt.log", "gpt.log", "gpt.jsonl", "llamafactory.jsonl", "deepspeed.log"]), st.data())
def test_progress_bars_between_lines_change_nothing(log, draw):
    lines = data(log).decode().splitlines()
    text = ""
    for line in lines:
        bars = draw.draw(st.integers(0, 2))
        text += (
            "".join("\r" + BAR % draw.draw(st.integers(0, 900)) for _ in range(bars)) + "\r" * bool(bars) + line + "\n"
        )
    assert readings(text.encode()) == WHOLE[log]


def test_bar_after_a_line_has_its_step_and_the_one_before_may_be_old():
    text = f"\r{BAR % 3}\r      \r{{'loss': '5.2', 'epoch': '1'}}\n\r{BAR % 4}\r{BAR % 5}\n"
    assert list(read([text])) == [Reading(4, 5.2, ms=1e3 / 31.92, total=900, source="trainer", epoch=1.0)]


@pytest.mark.parametrize(
    "state",
    [
        "\n\r 50%|#####     | 4/8 [00:00<00:00, 9.2it/s]\x1b[A",  # of an evaluation, below the training's
        "\rRunning tokenizer on dataset:  50%|#####     | 4/8 [00:00<00:00, 9.2 examples/s]",
        "\r 50%|#####     | 4/8 [00:00<00:0",
        "\r4/8",
        "\r 50%|#####     | 4/8 [00:00<00:00, 1..2it/s]",
    ],
)
def test_other_bars_have_no_step_of_the_training(state):
    text = f"{{'eval_loss': '5.2', 'epoch': '1'}}\n{state}\r{BAR % 6}\r"
    assert [each.step for each in read([text])] == [6]


def test_two_lines_without_a_bar_between_them_end_the_steps():
    line = "{'loss': '5.2', 'epoch': '1'}\n"
    reported = list(read([line, line, f"\r{BAR % 4}\r", line, f"\r{BAR % 6}\r"]))
    assert [each.step for each in reported] == [None, None, None]


def test_bar_overrides_the_count_of_lines():
    line = "{'loss': '5.2', 'epoch': '%s'}\n\r"
    text = ["logging_steps=10,\n", line % 0.1, BAR % 1, "\r", line % 1, BAR % 10, "\r"]
    assert [each.step for each in read(text)] == [1, 10]


def test_lines_are_not_counted_if_the_first_step_is_logged():
    lines = "".join(f"{{'loss': '5.2', 'epoch': '{epoch}'}}\n" for epoch in (0.1, 1, 2))
    assert [each.step for each in read(["logging_steps=10,\n", lines])] == [10, None, None]
    assert [each.step for each in read(["logging_first_step=True,\nlogging_steps=10,\n", lines])] == [None] * 3


def test_a_line_before_another_start_has_no_step():
    begins = "\r  0%|          | 0/32 [00:00<?, ?it/s]\r"
    line = "{'loss': '5.2', 'epoch': '1'}\n"
    reported = list(read([line, begins, line, f"\r{BAR % 4}\r"]))
    assert [each.step for each in reported] == [None, 4]


def test_slow_bar_shows_seconds_per_step():
    (found,) = read(["{'loss': '5.2'}\n\r  0%|   | 4/900 [01:01<4:09:00, 16.75s/it]\r"])
    assert found.ms == 16750


def test_whole_seconds_make_a_pace_when_there_are_enough_of_them():
    times = [(10, "0:00:05"), (20, "0:00:15"), (30, "0:00:25"), (40, "0:00:35"), (50, "0:00:44"), (45, "0:00:02")]
    lines = [f'{{"current_steps": {step}, "loss": 1.0, "elapsed_time": "{at}"}}\n' for step, at in times]
    assert [each.ms for each in read(lines)] == [None, None, 1000, None, None, None]


def test_examples_per_second_give_a_time_if_the_batch_is_known():
    speed = "epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=1.5, CurrSamplesPerSec=160.0, Mem=0GB\n"
    batch = "[config.py:678:print]   train_batch_size ............. 16\n"
    assert list(read([speed])) == []
    assert [each.ms for each in read([batch, speed])] == [100]


def test_time_without_a_step_has_no_step():
    line = "[Rank 0] time (ms) | fwd: 1.00 | bwd: 2.50 | bwd_inner: 2.00 | step: 0.50\n"
    reported = list(read(["[Rank 0] step=2, skipped=0, lr=[0.1], mom=[]\n", line, line]))
    assert [(each.step, each.ms) for each in reported] == [(2, None), (2, 4.0), (None, 4.0)]


@pytest.mark.parametrize(
    ("last", "count"),
    [("iter 2: loss 1.5, time 2.00ms, mfu", 1), ('{"current_steps": 2, "loss": 1.5}', 2), ("{'loss", 1)],
)
def test_last_line_without_a_newline_is_read_if_it_is_complete(last, count):
    assert len(list(read(["iter 1: loss 1.5, time 2.00ms\n", last]))) == count


def test_a_growing_log_is_read_as_it_grows():
    reader = Reader()
    assert reader.feed("iter 1: loss 1.5, ti") == []
    assert [each.step for each in reader.feed(b"me 2.00ms\niter 2: loss")] == [1]
    assert reader.close() == []


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"x" * 4096, id="no line ever ends"),
        pytest.param(("\r" + BAR % 7).encode() * 50, id="a bar that never ends its line"),
        pytest.param(b"iter 3: loss 1.5, time 2.00ms\n" * 100, id="losses"),
        pytest.param(b"{'loss': '1.5'}\n" + b"words about the loss\n" * 100, id="lines that wait for a bar"),
        pytest.param(b'{"current_steps": 5, "loss": [[' * 100, id="torn records"),
    ],
)
def test_memory_does_not_grow_with_the_log(endless):
    blocks = 2_000_000 // len(endless)
    tracemalloc.start()
    try:
        for _ in read(endless for _ in range(blocks)):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * LIMIT


def test_overlong_line_does_not_damage_the_next_one():
    random.seed(0)
    junk = re.sub(rb"[\r\n]", b"", random.randbytes(5 * LIMIT))
    content = junk + b"\niter 1: loss 1.5, time 2.00ms\n" + junk + b"\r" + junk + b"\niter 2: loss 1.5, time 2.00ms\n"
    for block in (999, LIMIT, len(content)):
        assert [each.step for each in readings(content, block)] == [1, 2]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"\r", b"\n", b"loss", b"{'loss': '1'}", b"%|", b"\xff"])))
def test_no_bytes_raise(parts):
    list(series(read(parts)))
