"""Readings of single lines of every known trainer, and of lines that look like theirs."""

from __future__ import annotations

import json
import math
import re
import sys
import time
import timeit
from pathlib import Path

import pytest
from case_table import every_case
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for reader_logs; last, so that it hides no module

from reader_logs import LOGS, data

from trainer.reader import MARKS, Reading, parse_all, read, series

MEGATRON = (
    " [2026-07-01 10:00:00] iteration      100/  500000 | consumed samples:        25600 | elapsed time per iteration"
    " (ms): 812.4 | learning rate: 1.500000E-05 | global batch size:   256 | lm loss: 9.512345E+00 | loss scale: 1.0 |"
    " grad norm: 2.345 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEGATRON_NAN = {"step": 5, "total": 9, "loss": math.nan, "grad_norm": -math.inf}
LINES = [
    (
        "{'loss': 2.5, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.1}",
        "trainer",
        {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-5, "epoch": 0.1},
    ),
    (
        "{'loss': '5.56', 'grad_norm': 'nan', 'learning_rate': '0', 'train_tokens_per_second': '1.03e+04'}",
        "trainer",
        {"loss": 5.56, "grad_norm": math.nan, "lr": 0.0, "tokens_per_second": 10300.0},
    ),
    ("{'loss': -inf, 'step': 7, 'rewards/margins': 0.1}", "trainer", {"loss": -math.inf, "step": 7}),
    ("{'eval_loss': '4.5', 'eval_runtime': '0.1', 'epoch': '2'}", "trainer", {"eval_loss": 4.5, "epoch": 2.0}),
    (
        '{"current_steps": 5, "total_steps": 9, "loss": NaN, "lr": 1e-3, "elapsed_time": "1 day, 2:03:04"}',
        "trainer_log",
        {"step": 5, "total": 9, "loss": math.nan, "lr": 1e-3, "elapsed": 93784},
    ),
    ('{"current_steps": 5, "eval_loss": null}', "trainer_log", {"step": 5, "eval_loss": math.nan}),
    (
        '{"event": "progress", "time": 1.5, "attempt": 1, "step": 10, "total": 60, "loss": 2, "throughput": 9.5}',
        "progress",
        {"step": 10, "total": 60, "loss": 2.0, "tokens_per_second": 9.5},
    ),
    ("iter 40: loss 2.3154, time 30.91ms, mfu 4.20%", "nanogpt", {"step": 40, "loss": 2.3154, "ms": 30.91}),
    (
        "iter 4: loss inf, time 3.00ms, mfu 41.2%, lr 3.0e-04, norm 0.81, tokens/s 50123, memory 12.3GB",
        "nanogpt",
        {"step": 4, "loss": math.inf, "ms": 3.0, "lr": 3e-4, "grad_norm": 0.81, "tokens_per_second": 50123.0},
    ),
    ("step 5: train loss 3.7234, val loss 3.6521", "nanogpt", {"step": 5, "eval_loss": 3.6521}),
    ("step 5: val loss nan, perplexity 11.7", "nanogpt", {"step": 5, "eval_loss": math.nan}),
    ("tokens per iteration will be: 491,520", "nanogpt", {"tokens": 491520}),
    ("[Rank 0] step=120, skipped=0, lr=[0.0001], mom=[[0.9, 0.999]]", "deepspeed", {"step": 120, "lr": 1e-4}),
    ("step=2, skipped=1, lr=[np.float64(1e-05)], mom=[]", "deepspeed", {"step": 2, "lr": 1e-5}),
    ("[config.py:678:print]   train_batch_size ............. 16", "deepspeed", {"batch": 16}),
    (
        "epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=1.5, CurrSamplesPerSec=1452.9, MemAllocated=0GB",
        "deepspeed",
        {"step": 4, "samples_per_second": 1452.9},
    ),
    (
        "[Rank 0] time (ms) | fwd: 1.00 | bwd: 2.50 | bwd_inner: 2.00 | bwd_allreduce: 0.50 | step: 0.50",
        "deepspeed",
        {"ms": 4.0},
    ),
    (
        "steps: 10 loss: 2.3456 iter time (s): 0.250 samples/sec: 64.000",
        "deepspeed",
        {"step": 10, "loss": 2.3456, "ms": 250.0},
    ),
    (
        MEGATRON,
        "megatron",
        {"step": 100, "total": 500000, "ms": 812.4, "lr": 1.5e-5, "loss": 9.512345, "grad_norm": 2.345},
    ),
    (" iteration 5/ 9 | lm loss: NAN | grad norm: -INF |", "megatron", MEGATRON_NAN),
    (
        " validation loss at iteration 1000 | lm loss value: 2.3E+00 | lm loss PPL: 9.97E+00 |",
        "megatron",
        {"step": 1000, "eval_loss": 2.3},
    ),
    ("logging_steps=10,", "trainer", {"logging_steps": 10}),
    ("logging_first_step=True,", "trainer", {"first_step": 1}),
    ("  Continuing training from global step 500", "trainer", {"from_step": 500}),
    ("  Resuming training from checkpoint with epoch 0 and global step 16", "trainer", {"from_step": 16}),
]


@every_case("line, source, values", LINES)
@every_case("before", ["", "2026-11-22T07:15:00.123Z [3] ", "[default0]:", " 29%|##  | 8/28 [00:00<00:0"])
def test_a_line(line, source, values, before):
    (reported, *_) = parse_all(before + line)
    assert reported.source == source
    assert set(reported.values) == set(values)
    for name, value in values.items():
        assert reported.values[name] == pytest.approx(value, nan_ok=True), name
        assert type(reported.values[name]) is type(value), name
    assert before.rstrip() in (before + line)[: reported.at]


@pytest.mark.parametrize("line", [line for line, _, _ in LINES])
def test_every_readable_line_contains_a_mark(line):
    assert any(mark in line for mark in MARKS)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "an ordinary line about loss and step=5",
        "{'train_runtime': '0.8', 'train_samples_per_second': '77', 'train_loss': '3.9', 'epoch': '1'}",
        "{'loss': 'small', 'epoch': '1'}",
        "{'loss': '5.2', 'gr",
        "{'loss': '5.2', 'gr\n_norm': '1'}",
        "'loss': '5.2'}",
        '{"current_steps": 5, "los',
        '{"current_steps": "5", "loss": 1.0}',
        '{"current_steps": true, "loss": 1.0}',
        '{"current_steps": -5, "loss": 1.0}',
        '{"current_steps": 1e400, "loss": 1.0}',
        '{"current_steps": ' + "9" * 400 + "}",
        '{"event": "log", "line": "{\\"event\\": \\"progress\\", \\"step\\": 1}"}',
        '{"event": "phase", "text": "progress"}',
        "iter 40: loss 2.3",
        "iter 40: loss 2.3154, time 30.9",
        "iter 40: loss none, time 1.00ms",
        "step 5: train loss 3.7234, val loss 3.65iter 6: loss 3",
        "step=120, skipped=0, lr=[0.00",
        "micro_step=120, skipped=",
        "time (ms) | fwd_microstep: 0.61 | bwd_microstep: 0.49 | step_microstep: 0.01",
        "time (ms) | fwd: 1.00 | bwd: 2.50 | bwd_inner: 2.00 | bwd_allreduce: 0.50 | step: 0.5",
        "the best val loss is good",
        "iteration 5 of many",
        "loss': " * 50,
        "{" * 5000 + '"current_steps"',
        '{"current_steps":' * 3000,
        "step=99999999999999999999, skipped=0, lr=[0.1], mom",
    ],
)
def test_torn_or_foreign_line_gives_no_reading(line):
    assert list(parse_all(line)) == []


def test_each_of_several_joined_lines_is_read():
    line = "{'loss': '5.2', 'epoch': '1'}{'loss': '5.3', 'gr{'loss': '5.4', 'epoch': '1'}iter 3: loss 1.5, time 2.00ms"
    assert [each.values["loss"] for each in parse_all(line)] == [5.2, 5.4, 1.5]


def values(text):
    (line,) = parse_all(text)
    return line.values


def test_invalid_numbers_are_skipped():
    line = json.dumps({"current_steps": 3, "loss": 10**400, "lr": "small", "eval_loss": True, "grad_norm": [1.0]})
    assert values(line) == {"step": 3}


@pytest.mark.parametrize("number", ["inf", "nan", "1e30", "-4", "7.5"])
def test_a_step_is_a_whole_number(number):
    assert values(f"{{'loss': 1.0, 'step': {number}}}") == {"loss": 1.0}


def test_keys_of_any_order_and_other_keys_do_not_matter():
    record = {"loss": 1.5, "a": {"b": [1, {"c": "}"}]}, "current_steps": 3}
    assert values(json.dumps(record)) == {"step": 3, "loss": 1.5}
    assert values(json.dumps(record, separators=(",", ":"))) == {"step": 3, "loss": 1.5}


@pytest.mark.parametrize(
    ("before", "rank"),
    [
        ("", None),
        ("[rank3]: ", 3),
        ("[default1]:", 1),
        ("[2026-11-23 03:10:51,852] [INFO] [logging.py:123:log_dist] [Rank 2] ", 2),
        ("2026-11-22T07:15:00.123Z [5] ", 5),
        ("2026-11-22T07:15:00.123Z [launcher] ", None),
        ("2026-11-22T07:15:00.123Z [5] [rank6]: ", 6),
        (" 62%|###   | 10/16 [00:00<00:01, 5.4it/s][default4]:", 4),
        ("[7] ", None),
    ],
)
def test_rank_of_a_line(before, rank):
    (found,) = read([f"{before}iter 3: loss 1.5, time 2.00ms\n"])
    assert found == Reading(3, 1.5, ms=2.0, rank=rank, source="nanogpt")


@settings(deadline=None)
@given(st.text(max_size=200) | st.sampled_from([line for line, _, _ in LINES]), st.integers(0, 400))
def test_no_text_raises(text, cut):
    list(parse_all(text[:cut]))


NUMBERED = sorted({line for log in LOGS for line in data(log).decode().splitlines() if re.search(r"\d", line)})
ODD = ["9" * 5000, "1." + "9" * 5000, "1e999", "-1", "nan", "\u00b2", "[" * 3000, "99:99:99", ""]


@given(st.data())
def test_no_number_in_a_real_line_raises(draw):
    """Any program can print a line of a trainer's form: with 5,000 digits, int() fails."""
    line = draw.draw(st.sampled_from(NUMBERED))
    numbers = list(re.finditer(r"\d+(?:\.\d+)?", line))
    found = draw.draw(st.sampled_from(numbers))
    line = line[: found.start()] + draw.draw(st.sampled_from(ODD)) + line[found.end() :]
    list(series(read([line + "\n"])))


def test_duration_of_5000_digits_is_ignored():
    (found,) = read([f'{{"current_steps": 5, "total_steps": 8, "loss": 4.5, "elapsed_time": "{"9" * 5000}:00:02"}}\n'])
    assert (found.step, found.loss) == (5, 4.5)


@settings(deadline=None)
@given(st.sampled_from(LOGS), st.data())
def test_a_part_of_a_real_line_gives_nothing_that_the_line_does_not(log, draw):
    line = draw.draw(st.sampled_from(data(log).decode().replace("\r", "\n").split("\n")))
    whole = [each.values for each in parse_all(line)]
    cut = line[: draw.draw(st.integers(0, len(line)))]
    for each in parse_all(cut):
        if "val loss" in line or "train_batch_size" in line or "tokens per" in line or "global step" in line:
            continue  # a number at the end of a line: only the newline shows that it is whole, see stream
        assert any(repr(each.values).rstrip("}") in repr(values) for values in whole), cut


@pytest.mark.parametrize(
    "line",
    [
        "x" * 4096,
        "{'a" * 1300,
        '{"a": ' * 600,
        "1|" * 2000,
        "loss " * 800,
        "time (ms) | fwd: 1 | bwd: 1 |" * 140,
        "step=1, skipped=0, lr=[" * 170,
        "steps: 1 loss: 1 iter time (s): " * 120,
        " iteration 1/ 1 |" * 240,
    ],
)
def test_every_line_is_read_quickly(line, allowed):
    for mark in MARKS:
        # At best of five times, whatever other processes and the processor's speed make of a single one.
        assert any(cpu_time(lambda text=mark + line: list(parse_all(text))) < allowed for _ in range(5)), mark


def cpu_time(work):
    """What it takes this thread."""
    return timeit.timeit(work, number=2, timer=time.thread_time)


@pytest.fixture(scope="module")
def allowed():
    return min(cpu_time(lambda: sum(range(400_000))) for _ in range(5))


DIGITS = re.compile(r"[0-9]+")


@pytest.mark.parametrize("number", ["9" * 5000, "²"], ids=["5000 digits", "superscript"])
def test_no_number_of_a_log_breaks_the_reader(number):
    """``int`` refuses more than 4,300 digits."""
    lines = [line for line, *_ in LINES] + [
        "[rank0]: iter 7: loss 2.5, time 3.5ms",
        "2026-01-01T00:00:00.000Z [3] iter 7: loss 2.5, time 3.5ms",
        '{"current_steps": 3, "total_steps": 9, "loss": 2.5, "elapsed_time": "1 day, 2:03:04"}',
    ]
    for line in lines:
        for found in DIGITS.finditer(line):
            changed = line[: found.start()] + number + line[found.end() :]
            list(read([changed + "\n"]))
