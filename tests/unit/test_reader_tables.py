"""Formats over several lines: trainer_state.json, metrics.csv, tables with a header."""

from __future__ import annotations

import json

import pytest

from trainer.reader import read, series


def found(text, size=1 << 20):
    data = text.encode()
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return [(each.step, each.loss, each.eval_loss) for each in read(parts)]


STATE = {
    "best_metric": None,
    "epoch": 1.0,
    "log_history": [
        {"epoch": 0.5, "grad_norm": 1.5, "learning_rate": 5e-05, "loss": 2.5, "step": 10},
        {"epoch": 0.5, "eval_loss": 2.75, "eval_runtime": 1.0, "step": 10},
        {"epoch": 1.0, "grad_norm": 1.25, "learning_rate": 0.0, "loss": 2.25, "step": 20},
        {"epoch": 1.0, "step": 20, "total_flos": 1.0, "train_loss": 2.375, "train_runtime": 9.0},
    ],
    "max_steps": 40,
}


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_trainer_state(size):
    text = json.dumps(STATE, indent=2, sort_keys=True) + "\n"
    assert found(text, size) == [(10, 2.5, None), (10, None, 2.75), (20, 2.25, None)]
    rows = series(read([text.encode()]))
    assert (rows.total, rows.last(1)[0].grad_norm, rows.sources) == (40, 1.25, {"trainer"})


def test_the_first_of_several_evaluation_sets():
    entries = [{"epoch": 1.0, f"eval_{name}_loss": 2.5 + at, "step": 10} for at, name in enumerate(("wikitext", "c4"))]
    text = json.dumps({"log_history": entries}, indent=2)
    assert [each for each in found(text) if each[2] is not None] == [(10, None, 2.5)]


@pytest.mark.parametrize("end", ["step 5 loss 2.5\n", "}\nstep 5 loss 2.5\n"])
def test_an_indented_object_before_a_log_hides_nothing(end):
    assert found('{\n  "loss_scale": 0,\n' + end) == [(5, 2.5, None)]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_lightnings_metrics(size):
    text = "epoch,lr-Adam,step,train_loss_epoch,train_loss_step,val_loss\n0,,49,,2.5,\n"
    text += "0,0.1,49,,,\n0,,99,,,2.75\n0,,99,2.5,,\n"
    assert found(text, size) == [(49, 2.5, None), (49, None, None), (99, None, 2.75)]


@pytest.mark.parametrize(
    "lines",
    [
        "| step | train loss | val loss |\n|-----:|-----------|----------|\n| 10 | 2.5 | 2.75 |\n| 20 | 2.25 | 2.5 |\n",
        "Step  Training Loss  Validation Loss\n10    2.5            2.75\n20    2.25           2.5\n",
        "step loss val_loss\n10 2.5 2.75\n20 2.25 2.5\n",
        (
            "  step    train_loss    valid_loss     dur\n------  ------------  ------------  ------\n"
            "    10        \x1b[36m2.5\x1b[0m          2.75  0.0621\n    20        2.25        2.5  0.0604\n"
        ),
    ],
)
def test_tables(lines):
    assert found(lines) == [(10, 2.5, 2.75), (20, 2.25, 2.5)]


@pytest.mark.parametrize(
    "lines",
    [
        "claim,date,loss\n10,2025-03-03,2310.5\n",
        "step,loss\n",
        "step,loss\nmse,0.5\n",
        "step,loss\n1.5,0.5\n",
        "step,loss\nBuilding\n10,2.5\n",
        "step,packet_loss\n10,2.5\n",
        "iteration,loss_weight\n10,2.5\n",
    ],
)
def test_other_tables(lines):
    assert found(lines) == []
