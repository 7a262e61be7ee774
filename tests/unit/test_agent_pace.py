"""The agent's judgement of the run as a whole: slow, as expected, and no false alarms."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from provision.errors import UsageError
from provision.run.expected import measured_band, typed_band
from provision.run.found import Part, Run
from provision.summaries.runs import run_lines, run_output
from provision.tasks.runs import RunStatus
from trainer.agent.contract.expected import Expected, from_object, read
from trainer.agent.contract.plan import PlanError, from_json
from trainer.agent.contract.untrusted import UntrustedError
from trainer.agent.pace import ROUNDS, SLICES, Judge, Pace
from trainer.agent.run_files import Events, NodePlan, State

RECORDED = Path(__file__).parent / "recorded_runs"
BAND = Expected("given", step_seconds=(0.4, 0.6), memory_bytes=(50e9, 60e9))


def steps(judge, count, seconds, *, start=0, now=0.0, phase="training", tick=0.25):
    """Feed steps as the agent sees them: at its ticks. Returns the changes and the time."""
    changes = []
    for step in range(start, start + count):
        now += seconds() if callable(seconds) else seconds
        seen = now - now % tick + tick
        judge.look(phase, seen)
        changes.append(judge.step(step, seen))
    return [change for change in changes if change], now


def test_a_slow_run_is_reported_once_and_so_is_its_return():
    judge = Judge(BAND)
    found, now = steps(judge, 400, 0.83)
    assert [change.bad for change in found] == [True]
    assert found[0].text.startswith("the run as a whole is slow: 0.8")
    assert found[0].text.endswith("s a step, expected 0.4 to 0.6 s (given)")
    assert judge.slow == found[0].text
    back, _ = steps(judge, 400, 0.5, start=400, now=now)
    assert [change.bad for change in back] == [False]
    assert "as fast as expected again: 0.5 s a step" in back[0].text
    assert judge.slow is None


def test_a_fast_run_is_no_problem():
    assert steps(Judge(BAND), 400, 0.1)[0] == []


def test_it_takes_rounds_of_windows_after_the_warm_up():
    judge = Judge(BAND)
    fewest = 1 + (1 + ROUNDS) * SLICES
    assert steps(judge, fewest - 1, 20.0)[0] == []
    assert [change.bad for change in steps(judge, 1, 20.0, start=fewest - 1, now=20.0 * (fewest - 1))[0]] == [True]


@pytest.mark.parametrize("seed", range(20))
def test_jitter_pauses_and_a_slow_start_are_no_alarm(seed):
    """Four hours of steps with a noise of 10 %, a pause that is not announced each 100 steps, and slow first steps."""
    chance, judge, done = random.Random(seed), Judge(BAND), [0]

    def seconds():
        done[0] += 1
        pause = chance.uniform(1, 60) if done[0] % 100 == 0 else 0.0
        slow = 20.0 if done[0] < 3 else 0.0
        return max(0.05, chance.gauss(0.52, 0.052)) + pause + slow + (5.0 if chance.random() < 0.01 else 0.0)

    assert steps(judge, 20_000, seconds)[0] == []


@pytest.mark.parametrize("usual", [0.13, 0.3, 0.52, 1.1, 3.0])
def test_a_run_like_an_earlier_one_is_no_alarm_and_a_slower_one_is(usual):
    """Whatever the length of a step is, beside the agent's ticks; 5 % slower than the earlier run is usual."""
    chance, earlier = random.Random(1), Judge()

    def around(factor):
        return lambda: max(0.01, chance.gauss(usual * factor, usual * 0.1))

    steps(earlier, int(3600 / usual), around(1.0))
    band = measured_band("earlier", earlier.measured())
    for factor, slow in ((0.95, []), (1.0, []), (1.05, []), (1.2, [True])):
        found, _ = steps(Judge(band), int(7200 / usual), around(factor))
        assert [change.bad for change in found] == slow, factor


def test_announced_pauses_do_not_count():
    """A line for every ten steps, each with an evaluation that is as long as the steps."""
    judge, now, found = Judge(BAND), 0.0, []
    for step in range(0, 1000, 10):
        for second in range(5):
            judge.look("training", now + second)
        found.append(judge.step(step, now + 5))
        judge.look("training", now + 5)
        for second in range(5):
            judge.look("evaluating", now + 6 + second)
        now += 10
    assert not any(found)
    assert 0.4 < judge.measured()["step_seconds"][1] < 0.6


def test_repeated_steps_of_a_resume_restart_the_slice():
    judge = Judge(BAND)
    _, now = steps(judge, 100, 0.5)
    assert steps(judge, 300, 0.5, start=50, now=now + 300)[0] == []


def test_more_memory_than_expected_is_reported_once():
    judge = Judge(BAND)
    found = [judge.memory(used) for used in [58e9] * 5 + [61e9] * 2 + [58e9] + [62e9] * 9 + [55e9] * 9]
    full, normal = (change for change in found if change)
    assert full.text == "a GPU holds more than expected: 62 GB, expected 50 to 60 GB (given)"
    assert not normal.bad


def replay(folder, band):
    """The changes in a recorded run's events, by the times in them."""
    judge, found, phase = Judge(band), [], "training"
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        phase = event["phase"] if event["event"] == "phase" else phase
        judge.look(phase, event["time"])
        if event["event"] == "progress" and isinstance(event.get("step"), int):
            found.append(judge.step(event["step"], event["time"]))
    return judge, [change for change in found if change]


@pytest.mark.parametrize("case", sorted(path.name for path in RECORDED.glob("healthy_*")))
def test_healthy_recorded_runs_stay_in_the_band_that_they_measured(case):
    for folder in sorted(path.parent for path in (RECORDED / case).glob("*/events.jsonl")):
        measured = replay(folder, None)[0].measured()
        if "step_seconds" in measured:
            assert replay(folder, measured_band(case, measured))[1] == [], folder


def test_a_recorded_run_that_became_slower_is_slow_by_its_start():
    (folder,) = (path.parent for path in (RECORDED / "slower_than_before").glob("*/events.jsonl"))
    (change,) = replay(folder, Expected("its start", step_seconds=(0.9, 1.1)))[1]
    assert change.text == "the run as a whole is slow: 1.9 s a step, expected 0.9 to 1.1 s (its start)"


def test_only_rank_0_judges_and_its_files_have_all_of_it(tmp_path):
    band = BAND.to_object()
    for rank in (0, 1):
        logs = tmp_path / str(rank)
        logs.mkdir()
        plan = plan_of(node_rank=rank, nnodes=2, expected=band, link=None)
        events, state = Events(logs), State(logs, phase="training")
        pace = Pace(NodePlan(plan, tmp_path, tmp_path / "plan.json"), events, state)
        for step in range(90):
            pace.look("training", step * 2.0)
            pace.progress({"step": step, "loss": 1.0, "tokens_per_second": 100.0}, step * 2.0)
            pace.sample({"gpus": [{"memory": 10}, {"memory": None}]})
        written = [json.loads(line) for line in (logs / "events.jsonl").read_text().splitlines()]
        if rank:
            assert written == []
            assert not state.fields["slow"]
            continue
        (notice,) = written
        assert notice["kind"] == "slowdown"
        assert notice["text"].endswith("expected 0.4 to 0.6 s (given). Next: clusterctl diagnose r")
        assert state.fields["expected"] == band
        assert state.fields["slow"] == "the run as a whole is slow: 2 s a step, expected 0.4 to 0.6 s (given)"
        assert state.fields["measured"] == {
            "step_seconds": [2.0, 2.0, 2.0], "tokens_per_second": [100.0] * 3, "memory_bytes": [10, 10, 10],
        }  # fmt: skip


# --- the band ------------------------------------------------------------------------------------


def test_a_plan_with_a_band_is_read_back():
    plan = plan_of(expected=BAND.to_object())
    assert plan.expected == BAND
    assert from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "an object"),
        ({}, "version"),
        ({"version": 2}, "version is 2"),
        ({"version": True}, "version"),
        ({"version": 1, "step": 1}, "step is not a known key"),
        ({"version": 1, "step_seconds": [2, 1]}, "the lower one first"),
        ({"version": 1, "step_seconds": [0, 1]}, "positive"),
        ({"version": 1, "step_seconds": [1, float("nan")]}, "positive"),
        ({"version": 1, "step_seconds": [1, 1e300]}, "positive"),
        ({"version": 1, "memory_bytes": "all"}, "two positive numbers"),
        ({"version": 1, "basis": "x" * 301}, "at most 300"),
    ],
)
def test_a_bad_band_is_refused_with_its_key(value, text):
    with pytest.raises(UntrustedError, match=text):
        from_object(value)
    assert read(value) is None
    with pytest.raises(PlanError, match="expected: "):
        plan_of(expected=value)


def test_a_typed_band():
    assert typed_band("0.4-0.6").step_seconds == (0.4, 0.6)
    assert typed_band("20261123-101500-sft-1a2b") is None
    for text in ("0.6-0.4", "0-1"):
        with pytest.raises(UsageError, match="the lower number"):
            typed_band(text)


def test_the_band_of_an_earlier_run():
    band = measured_band("sft", {"step_seconds": [0.49, 0.5, 0.6], "memory_bytes": [10.0, 10.0, 10.0], "x": 1})
    assert band.step_seconds == pytest.approx((0.45, 0.6))
    assert band.memory_bytes == pytest.approx((9.0, 11.0))
    assert band.tokens_per_second is None
    for measured in (None, {}, {"step_seconds": [1, 2]}, {"step_seconds": [0, 1, float("inf")]}, {"step_seconds": "x"}):
        with pytest.raises(UsageError, match="no measured step time"):
            measured_band("sft", measured)


# --- status --------------------------------------------------------------------------------------


def test_status_shows_the_band_and_that_the_run_is_slow():
    slow = "the run as a whole is slow: 0.83 s a step, expected 0.4 to 0.6 s (given)"
    fields = {"state": "running", "slow": slow, "expected": BAND.to_object()}
    run = Run("sft-a", (Part("sft-a", "node01", fields, alive=True),))
    text = run_output(RunStatus(run, {}), 0.0)[1]
    assert "  expected: 0.4 to 0.6 s a step (given)\n" in text
    assert f"  {slow}\n" in text
    assert "clusterctl diagnose sft-a, clusterctl check" in text
    assert f"sft-a: {slow}: clusterctl diagnose sft-a" in run_lines({"sft-a": run}, 0.0)
    normal = Run("sft-a", (Part("sft-a", "node01", {"state": "running", "slow": None}, alive=True),))
    assert "slow" not in run_output(RunStatus(normal, {}), 0.0)[1]
