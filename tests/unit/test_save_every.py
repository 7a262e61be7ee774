"""When to save: the formulas, and the agent that lets a trainer save at the best interval."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import Run, plan_of
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.run.effective import judge, observed, typed
from provision.run.job import Job
from provision.run.save_every import read_save_every, save_every
from provision.summaries.effective import effective_text, interval_text
from trainer import ds_config
from trainer.agent.contract import interval
from trainer.agent.contract.effective import Effective
from trainer.agent.contract.interval import NONE, Failures, best_interval, time_between_failures, too_short
from trainer.agent.contract.plan import PlanError, SaveEvery, from_json
from trainer.agent.run_files import NodePlan
from trainer.agent.saves import catches, save_argument
from trainer.agent.supervisor.attempt import with_checkpoint
from trainer.plan import Cluster, Training, load
from trainer.plan.saves import describe, saves

SPENT = Effective(
    training=9000, saving=100, repeating=900, saves=10, restarts=4, failures=4, repeated=90, pace=10.0, top=900
)


def test_young_and_daly():
    # Daly's example in section 3 has costs that are small beside M; there Young's formula is close.
    assert best_interval(5 * 60, 24 * 3600) == pytest.approx(math.sqrt(2 * 300 * 86400), rel=0.05)
    assert best_interval(600, 3000) == pytest.approx(
        math.sqrt(2 * 600 * 3000) * (1 + math.sqrt(0.1) / 3 + 0.1 / 9) - 600
    )
    assert best_interval(100, 50) == 50  # saves cost more than the run lives


@given(st.floats(0.01, 1e4), st.floats(60, 1e8))
def test_the_best_interval_loses_about_least(cost, between):
    best = best_interval(cost, between)
    assert best > 0
    if best > 10 and cost < between / 50:
        losses = [interval.loss(best * factor, cost, between) for factor in (0.5, 1, 2)]
        assert losses[1] <= min(losses) * 1.001


@pytest.mark.parametrize("values", [(0, 5), (-1, 5), (5, 0), (math.nan, 5), (5, math.inf)])
def test_values_without_an_interval(values):
    with pytest.raises(ValueError, match="positive number of seconds"):
        best_interval(*values)


def test_the_rate_of_failures_starts_at_the_published_one():
    assert 1 / NONE.rate() == pytest.approx(6335, rel=0.12)  # hours of a node
    assert time_between_failures(2048, NONE) == pytest.approx(54 * 24 * 3600 / 419, rel=0.12)  # of Llama 3's run
    assert Failures(4, 10).rate() == pytest.approx(0.4, rel=0.5)  # four at once replace the published rate
    assert Failures(1, 10).rate() < 10 * NONE.rate()  # one does not
    assert Failures(1000, 2000).rate() == pytest.approx(0.5, rel=0.01)
    assert Failures(3, 0).rate() == NONE.rate()  # without hours nothing was observed
    assert time_between_failures(16, Failures(0, 1e5)) > time_between_failures(16, NONE)  # no failure in many hours
    assert time_between_failures(16, Failures(9, 100)) < time_between_failures(16, NONE) / 9
    with pytest.raises(ValueError, match="0 nodes"):
        time_between_failures(0, NONE)


def test_an_interval_shorter_than_a_save():
    assert too_short(60, 2) is None
    assert too_short(60, None) is None
    assert "shorter than a save, which takes 90 s" in too_short(60, 90)
    assert "at least 10 s" in too_short(5, None)
    assert too_short(math.nan, None)


def test_failures_of_recorded_runs():
    spent = SPENT.to_object()
    records = {
        "r1": {"spent": spent, "nodes": ["a", "b"]},
        "r2": {"spent": dict(spent, failures=1), "nodes": ["a"]},
        "old": {"nodes": ["a"]},
        "bad": {"spent": {"version": 1, "training": "x"}, "nodes": ["a"]},
        "mine": {"spent": spent, "nodes": ["a"]},
    }
    found = observed(records, without="mine")
    assert found.seen == 5
    assert found.node_hours == pytest.approx(3 * 10000 / 3600)


def test_the_advice_names_the_largest_part():
    found = judge("r1", SPENT, 4, NONE)
    assert found.interval == pytest.approx(best_interval(10, found.between))
    assert found.advice == (
        "repeating took 9 % of the time: 4 restarts repeated 90 steps; a save every 5min instead of 16min repeats fewer"
    )
    saving = SPENT._replace(saving=2000, repeating=0, failures=0, restarts=0, saves=200)
    assert "a save every" in judge("r1", saving, 4, NONE).advice
    assert "instead of 45s costs less" in judge("r1", saving, 4, NONE).advice
    starting = SPENT._replace(starting=6000)
    assert judge("r1", starting, 4, NONE).advice.startswith("starting took 38 % of the time: a longer run")
    assert "clusterctl diagnose r1" in judge("r1", SPENT._replace(recovering=3000), 4, NONE).advice
    assert judge("r1", SPENT._replace(repeating=0, saving=10), 4, NONE).advice == ""
    assert judge("r1", Effective(), 4, NONE) == judge("r1", Effective(), 4, NONE)
    assert judge("r1", Effective(), 4, NONE).interval is None
    assert "best saved every" in interval_text(found)
    assert effective_text(SPENT) == ("effective training time 90.0 % of 2 h 46 min: repeating 9.0 %, saving 1.0 %")
    assert "unknown" in effective_text(None)
    assert [typed(seconds) for seconds in (90, 600, 9000)] == ["90s", "10min", "2h"]


@pytest.mark.parametrize(("text", "seconds"), [("auto", None), ("90s", 90), ("10min", 600), ("2h", 7200)])
def test_an_interval_is_read(text, seconds):
    assert read_save_every(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "5s", "-3min", "1d", "auto ", "9999999s", "٣s"])
def test_an_interval_that_cannot_be_used(text):
    with pytest.raises(UsageError, match="--save-every"):
        read_save_every(text)


def test_only_trainers_whose_interval_can_be_set():
    failures = Failures(2, 50)
    assert save_every(None, Job("script", "train.py"), {}, failures) is None
    assert save_every("auto", Job("module", "trainer.lm"), {}, failures) == SaveEvery(None, 2, 50)
    assert save_every("10min", Job("config", "sft.yaml"), {}, failures) == SaveEvery(600, 2, 50, "save_steps={steps}")
    with pytest.raises(UsageError, match="save_strategy: epoch exclude"):
        save_every("auto", Job("config", "sft.yaml"), {"save_strategy": "epoch"}, failures)
    with pytest.raises(UsageError, match=r"train\.py has no interval"):
        save_every("auto", Job("script", "train.py"), {}, failures)


def test_the_argument_of_an_attempt_follows_the_measured_pace(tmp_path):
    plan = plan_of(save={"seconds": 600, "argument": "save_steps={steps}"})
    assert save_argument(plan, None) is None  # nothing is known yet: the configuration's own value stays
    assert save_argument(plan, SPENT) == "save_steps=60"
    auto = plan_of(save={"argument": "save_steps={steps}"}, nnodes=4)
    expected = judge("r", SPENT, 4, NONE).interval
    assert save_argument(auto, SPENT) == f"save_steps={round(expected / 10)}"
    slow = SPENT._replace(saving=9000, saves=10)  # a save takes 900 s, longer than the interval
    assert save_argument(plan, slow) == "save_steps=180"
    assert save_argument(plan_of(save={"seconds": 600}), SPENT) is None  # by a signal
    node = NodePlan(plan, tmp_path, tmp_path / "plan-0.json")
    assert with_checkpoint(node, {}, save_argument(plan, SPENT))[0] == ["x", "save_steps=60"]
    assert with_checkpoint(node, {})[0] == ["x"]
    assert save_argument(plan_of(), SPENT) is None


def test_a_plan_with_a_wrong_interval_is_refused():
    good = plan_of(save={"seconds": 60.0})
    assert from_json(good.to_json()) == good
    for wrong in ({"seconds": -1}, {"seconds": "x"}, {"failures": math.nan}, {"often": 3}, []):
        with pytest.raises(PlanError, match="save"):
            plan_of(save=wrong)


def test_which_processes_get_the_signal():
    assert catches(b"Name:\tx\nSigCgt:\t0000000000000800\n")
    assert not catches(b"Name:\tx\nSigCgt:\t0000000000000400\n")
    assert not catches(b"SigCgt:\tzz\n")
    assert not catches(b"")


# Stands in for trainer.lm: it saves on SIGUSR2 and continues. A child without a handler would die of the signal.
PROGRAM = """
import os, signal, subprocess, sys, time
wanted = []
signal.signal(signal.SIGUSR2, lambda *_: wanted.append(1))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
step, saved = 0, 0
while saved < 2 and step < 600:
    step += 1
    time.sleep(0.1)
    print("step %d/600 | loss: 1.0" % step, flush=True)
    if wanted:
        wanted.clear()
        saved += 1
        print("clusterctl: phase saving", flush=True)
        time.sleep(0.3)
        print("clusterctl: phase training", flush=True)
assert child.poll() is None
child.kill()
sys.exit(0 if saved == 2 else 1)
"""


def test_an_agent_lets_the_trainer_save(tmp_path):
    package = tmp_path / "trainer" / "lm"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(PROGRAM)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    run = Run(tmp_path)
    try:
        argv = [sys.executable, "-m", "trainer.lm", "x"]
        # Not through --save-every, which refuses two seconds: a test must not wait longer.
        run.start("", argv=argv, save={"seconds": 2.0})
        events = run.finish()
        assert events[-1]["state"] == "finished", json.dumps(events[-5:])
        assert events[-1]["spent"]["saves"] == 2
        texts = [event["text"] for event in events if event["event"] == "notice"]
        assert any("saving every 2 s" in text for text in texts)
        assert any("an interval must be at least 10 s" in text for text in texts)
    finally:
        run.close()


def test_the_plan_says_how_often_to_save():
    shape, card = load("llama-3-8b"), ds_config.find("H100")
    cluster = Cluster(16, 8, card, 80.0, disk=2.0)
    found = saves(Training(shape), cluster)
    assert found.bytes == pytest.approx(14 * shape.parameters)
    assert found.seconds == pytest.approx(found.bytes / 32e9)
    assert found.between == time_between_failures(16, NONE)
    assert found.interval == best_interval(found.seconds, found.between)
    assert "a checkpoint has about 112 GB, which takes 3.5 s at 2 GB/s per node" in describe(found, cluster)
    often = saves(Training(shape), Cluster(16, 8, card, 80.0, disk=2.0, failures=50.0))
    assert often.between == 3600 * 1000 / (50 * 16)
    assert saves(Training(shape, method="lora"), cluster).bytes < found.bytes / 100
