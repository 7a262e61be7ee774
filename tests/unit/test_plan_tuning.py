"""What ``plan --tune`` measures, reads in the logs and keeps."""

import json
import math
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import RunFailedError
from provision.tasks.tune import Limit, overrides, why_failed
from trainer.ds_config import find
from trainer.plan import MODELS, Cluster
from trainer.plan.factory import Job, Settings, rows_of
from trainer.plan.faster import faster
from trainer.plan.lengths import Lengths
from trainer.plan.tuning import Candidate, Measured, candidates, corrected, fastest, judged, measured, rows_of_log

BASE = Settings(method="full", batch=1, accumulation=16, precision="bf16")
CARD = find("H200")
JOB = Job(MODELS["qwen2.5-3b"], Lengths((100, 300, 800, 1500) * 100, 400, exact=True), Cluster(1, 1, CARD, 141.0))
ONE = Candidate("as it is", BASE)


def log(steps, seconds=1.0, loss=5.0, **more):
    """A trainer_log.jsonl: each step takes so many seconds and a hundredth of the data."""
    return "".join(
        json.dumps({
            "current_steps": step, "loss": loss + 0.01 * (-1) ** step, "epoch": step / 100,
            "total_tokens": 100 * step, "throughput": 100 / seconds, **more,
        }) + "\n"
        for step in range(1, steps + 1)
    )  # fmt: skip


def test_candidates_start_with_the_configuration_and_the_recommendation():
    found = faster(JOB, BASE)
    chosen = candidates(JOB, found, deepspeed=True)
    assert [each.name for each in chosen[:2]] == ["as it is", "recommended"]
    assert chosen[2].name.startswith("ZeRO-1, ")
    assert chosen[2].settings.zero == 1
    assert (chosen[0].settings, chosen[1].settings) == (BASE, found.best)
    assert len({each.settings for each in chosen}) == len(chosen) == 6
    assert len(candidates(JOB, found, most=2)) == 2
    assert all(each.settings.zero is None for each in candidates(JOB, found))


def test_times_are_those_of_the_counted_tokens():
    rows = rows_of_log(log(20, seconds=0.25) + "no json\n[1]\n" + json.dumps({"current_steps": 21, "loss": None}))
    assert len(rows) == 20
    assert rows[-1].seconds == pytest.approx(5.0)
    (row,) = rows_of_log('{"current_steps": 3, "loss": 1.5, "elapsed_time": "1 day, 1:02:03", "epoch": 0.5}')
    assert (row.step, row.epoch, row.seconds) == (3, 0.5, 3723.0)


@given(st.text(max_size=300))
def test_any_log_can_be_read(text):
    assert isinstance(rows_of_log(text), list)


def test_the_first_steps_are_not_timed():
    rows = rows_of_log(log(20, seconds=0.5, vram_reserved=33.5))
    slow = [row.__class__(row.step, row.epoch, row.seconds + 100, row.loss, row.memory) for row in rows]
    for each in (rows, slow):
        found = measured(ONE, each, tokens=1000.0)
        assert found.epochs == pytest.approx(0.02)
        assert found.tokens == pytest.approx(20.0)
        assert (found.loss, found.memory, found.steps) == (pytest.approx(5.0, abs=0.01), 33.5, 20)


def test_the_loss_is_that_of_the_same_samples():
    rows = rows_of_log(log(10, loss=6.0)) + rows_of_log(log(40, loss=1.0))[10:]
    assert measured(ONE, rows, 1.0, until=0.1).loss == pytest.approx(6.0, abs=0.02)
    assert measured(ONE, rows, 1.0).loss == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_too_few_steps_are_no_measurement(steps):
    found = measured(ONE, rows_of_log(log(steps)), 1.0)
    assert found.dropped
    assert math.isnan(found.loss)


def result(name, epochs, loss=5.0, error=0.01, dropped=""):
    return Measured(Candidate(name, BASE), epochs, epochs, loss, error, steps=20, dropped=dropped)


def test_the_fastest_with_an_equal_loss_is_kept():
    found = judged([
        result("base", 1.0), result("equal", 3.0, 5.02), result("worse", 9.0, 5.6), result("better", 9.0, 4.4),
        result("full", 0.0, dropped="out of memory"),
    ])  # fmt: skip
    assert fastest(found).candidate.name == "equal"
    assert [bool(each.dropped) for each in found] == [False, False, True, True, True]
    assert "differs from 5.0000" in found[2].dropped


def test_steps_with_other_samples_are_not_compared():
    same, other = (replace(result("x", 3.0), share=share) for share in (0.012, 0.02))
    found = judged([replace(result("base", 1.0), share=0.01), same, other])
    assert [bool(each.dropped) for each in found] == [False, False, True]
    assert "2.00 times the samples" in found[2].dropped


def test_estimated_lengths_are_corrected_by_the_first_measurement():
    rough = replace(JOB, lengths=replace(JOB.lengths, exact=False))
    rows = rows_of(rough, BASE)
    base = replace(result("base", 1.0), width=2.5 * rows.width * 16)
    found = corrected(rough, base).lengths
    assert found.mean == pytest.approx(2.5 * JOB.lengths.mean, rel=0.01)
    assert found.bytes == pytest.approx(4 / 2.5)
    assert corrected(JOB, base) is JOB
    assert corrected(rough, replace(base, width=0.0)) is rough


def test_noise_widens_what_counts_as_equal():
    quiet = judged([result("base", 1.0), result("other", 2.0, 5.3, 0.02)])
    noisy = judged([result("base", 1.0, error=0.1), result("other", 2.0, 5.3, 0.1)])
    assert [bool(each[1].dropped) for each in (quiet, noisy)] == [True, False]


def test_nothing_is_kept_if_everything_was_dropped():
    assert fastest([result("base", 0.0, dropped="out of memory")]) is None


def test_overrides_are_yaml_and_keep_the_users_folders_clean():
    best = faster(JOB, BASE).best
    given_config = {"output_dir": "/shared/out", "deepspeed": "z3.json", "resume_from_checkpoint": "old"}
    words = list(overrides(given_config, BASE, best.with_(zero=1), {"dataloader_num_workers": 4}))
    values = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
    assert (values["output_dir"], values["dataloader_num_workers"]) == ("tune", 4)
    assert values["eval_strategy"] == values["save_strategy"] == "no"
    assert values["per_device_train_batch_size"] == best.batch if best.batch != 1 else True
    assert values["deepspeed"] is None
    assert values["resume_from_checkpoint"] is None
    assert "deepspeed" not in {word.partition("=")[0] for word in overrides({}, BASE, best, {})}


def test_a_failure_is_one_line():
    trace = "rank 0 exited with code 1\nTraceback\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    assert why_failed(RunFailedError("failed", reasons={"node01": trace})).startswith("out of memory: torch.OutOf")
    other = "rank 0 exited with code 1\nTraceback\nValueError: no such template\n"
    assert why_failed(RunFailedError("failed", reasons={"node01": other})) == "ValueError: no such template"
    assert why_failed(RunFailedError("failed", reasons={})) == "failed"


def test_a_candidate_stops_after_its_steps_or_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("provision.tasks.tune.time.monotonic", lambda: now[0])
    base, other = Limit(60, None), Limit(60, 25)
    assert not base(None)
    now[0] = 100.0
    assert not base(1)
    assert not other(1)
    now[0] = 161.0
    assert not base(3)  # too few steps to compare losses
    assert base(10)
    assert not other(24)
    assert other(25)
    now[0] = 281.0
    assert base(3)
    assert other(3)
    now[0] = 10_000.0
    assert Limit(60, None)(None) is False
