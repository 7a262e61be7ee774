"""Readings of programs that no special format knows, and of lines without numbers of a training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.reader import read, series


def found(*lines):
    return [(each.step, each.loss, each.eval_loss) for each in read([line + "\n" for line in lines])]


@pytest.mark.parametrize(
    ("line", "reading"),
    [
        ("[titan] 2026-05-18 16:04:46,338 - root - INFO - step: 14  loss:  3.24405  tps: 7,282", (14, 3.24405, None)),
        ("1|25|Loss: 1.2345: 100%|#####| 25/25 [00:10<00:00,  2.5it/s]", (25, 1.2345, None)),
        ("Step 1 | loss:1.2345 lr:2e-05 tokens_per_second_per_gpu:1234.5", (1, 1.2345, None)),
        ("step 00100/21400 (0.47%) | loss: 3.123456 | lrm: 1.00 | dt: 345.12ms", (100, 3.123456, None)),
        ("step:125/1750 val_loss:4.5123 train_time:1234ms step_avg:9.87ms", (125, None, 4.5123)),
        ("Epoch 1 | iter 4 step 1 | loss train: 1.504, val: n/a | iter time: 300.12 ms (step)", (1, 1.504, None)),
        ("Epoch 0:  50%|##  | 50/100 [00:10<00:10,  5.00it/s, v_num=0, train_loss=2.310]", (50, 2.31, None)),
        ("Epoch: 0, Step: 10, Rank: 0, loss = 2.345", (10, 2.345, None)),
        ("Epoch [1/3] Step [10/100] Loss: 2.31", (10, 2.31, None)),
        ("Step 50: Loss=1.23", (50, 1.23, None)),
        ('{"train": {"loss": 2.5}, "step": 7}', (7, 2.5, None)),
        ("{'train/loss': tensor(2.3100, device='cuda:0'), 'step': 5}", (5, 2.31, None)),
        ("\x1b[32mINFO\x1b[0m:__main__:step=10 loss=2.31", (10, 2.31, None)),
        ("step 7 loss 2.5 min 1.5 max 3.5", (7, 2.5, None)),
        ("{'loss': 2, 'lr': 1e-05, 'iteration': 7}", (7, 2.0, None)),
        ('"step 7", {"iteration": 7, "loss": 2}', (7, 2.0, None)),
        ("epoch 001 | valid on 'valid' subset | loss 9.9 | ppl 900 | num_updates 500", (500, None, 9.9)),
    ],
)  # fmt: skip
def test_a_line_of_another_program(line, reading):
    assert found(line) == [reading]


@pytest.mark.parametrize("first", [1, 17, 41])
def test_steps_that_count_through_all_epochs_are_those_of_the_training(first):
    """Also if the log starts in a later epoch, as that of a resumed run does."""
    lines = [f"Epoch [{(step - 1) // 8 + 1}/8] Step [{step}/64] Loss: 2.5\n" for step in range(first, 65)]
    readings = list(read(lines))
    assert [each.step for each in readings] == list(range(first, 65))
    assert {each.total for each in readings} == {None, 64}


def test_bar_that_starts_again_has_the_loss_of_its_end_and_no_step():
    """Lightning's bar returns to 0 before its title has the next epoch."""
    bars = [(0, 1, 3.5), (0, 2, 3.0), (0, 0, 3.0), (1, 0, 3.0), (1, 1, 2.5), (1, 2, 2.0)]
    lines = [
        f"\rEpoch {epoch}:  50%|##  | {step}/2 [00:10<00:10,  5.00it/s, v_num=0, train_loss={loss}]"
        for epoch, step, loss in bars
    ]
    assert [(each.step, each.loss) for each in read([*lines, "\n"])] == [(1, 3.5), (2, 3.0), (3, 2.5), (4, 2.0)]


def test_steps_of_an_epoch_at_the_place_of_a_training_are_corrected_at_the_next_epoch():
    lines = [f"Epoch [{epoch}/4] Step [{step}/20] Loss: 2.5\n" for epoch, step in [(3, 12), (3, 20), (4, 10), (4, 20)]]
    assert [each.step for each in read(lines)][2:] == [70, 80]


@pytest.mark.parametrize(
    "line",
    [
        "10 packets transmitted, 10 received, 0% packet loss, step 5",
        "max_steps=100, loss_scale=0",
        '{"loss_weight": 0.1, "step": 5}',
        "Step 3/5 : RUN pip install loss 5",
        "warning: implicit conversion loss of precision: 64 step 3",
        "Test:  [  0/25]  eta: 0:00:10  loss: 2.1 (2.1)",
        "step 5: aux_loss 2.3",
        "loss: mse, step: 5",
        "epoch 5: total loss 2310 EUR",
        "epoch 5: total loss 2310.50 EUR",
        "step 5: loss 3.5 dB",
        "step 4: total loss 2,310.50",
        "Step 3: the loss: 350",
        "{'train_runtime': 1.5, 'train_loss': 2.3, 'step': 5, 'epoch': 1.0}",
    ],
)
def test_a_line_without_a_training_loss(line):
    assert found(line) == []


def test_steps_that_start_again_in_each_epoch_continue():
    lines = [f"Epoch [{epoch}/3] Step [{step}/20] Loss: 2.5" for epoch in (1, 2, 3) for step in (10, 20)]
    rows = series(read([line + "\n" for line in lines]))
    assert ([row.step for row in rows], rows.resumes, rows.total) == ([10, 20, 30, 40, 50, 60], (), 60)


def test_an_epoch_is_a_step_only_without_steps():
    assert found("epoch 0: train_loss 2.5", "epoch 1: train_loss 2.25") == [(0, 2.5, None), (1, 2.25, None)]
    assert found("step 10 loss 2.5", "epoch 0: train_loss 2.5") == [(10, 2.5, None)]


def test_lines_of_one_shape_keep_their_names():
    lines = [
        "step 1 eval_a1_loss 2.5",
        "step 1 eval_a2_loss 3.5",
        "step 2 eval_a2_loss 3.25",
        "step 2 eval_a1_loss 2.25",
    ]
    assert found(*lines) == [(1, None, 2.5), (2, None, 2.25)]


@pytest.mark.parametrize("more", ["", " tokens_per_second 7,282"])
def test_lines_of_one_shape_keep_their_exponents(more):
    texts = [f"step 1 loss 2.5{more} lr {lr}\n" for lr in ("1e-05", "2e-07", "1.5E05", "3.5E04", "-3e+1", "4e-1234")]
    assert [each.lr for each in read(texts)] == [1e-05, 2e-07, 1.5e05, 3.5e04, -30, None]


@pytest.mark.parametrize("lines", [("7,282", "7,28", "999"), ("7,28", "7,282", "999"), ("999", "7,28", "7,282")])
def test_groups_of_digits_have_three(lines):
    texts = [f"step 1 loss 2.5 tokens_per_second {number}\n" for number in lines]
    speeds = [each.tokens_per_second for each in read(texts)]
    assert speeds == [{"7,282": 7282, "999": 999, "7,28": 7}[number] for number in lines]


@given(st.text(max_size=300) | st.text("loss step=:|0123456789.[]{}'\"/", max_size=300))
def test_no_text_raises(text):
    list(read([text + " loss\n"]))


def test_the_end_of_a_torn_object_is_no_reading():
    assert list(read([b'"eval_loss": 3.84, "epoch": 1.0, "percentage": 12.5}\n'])) == []
