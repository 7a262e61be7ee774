"""When a run that is silent hangs, and when it does not: a simulated clock and a simulated /proc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agent_life import EVALUATING, LOADING, RUNNING, SAVING, TOKENIZING, Life, trained

from trainer.agent import silence


@pytest.mark.parametrize(("pace", "limit"), [(3, 120), (10, 200), (60, 1200)])
def test_training_that_hangs(pace, limit):
    life = trained(pace)
    life.wait(limit - 1)
    assert life.found == []
    life.wait(2)
    ((_, hang),) = life.found
    assert (hang.kind, hang.rank) == ("no progress", None)
    assert f"the last was step 10, and a step takes {pace} s" in hang.text


def test_a_hang_and_its_end_are_reported_once():
    life = trained()
    life.wait(1000)
    assert life.kinds == ["no progress"]
    life.train(1).wait(1)
    assert life.watch.notices() == ["the run makes progress again"]
    assert life.wait(1790).kinds == ["no progress"]
    assert life.wait(20).kinds == ["no progress"] * 2


@pytest.mark.parametrize("what", ["line", "bytes"])
def test_line_or_growing_log_ends_the_silence(what):
    life = trained()

    def speak(second):
        if second % 100 == 99:
            life.say("still here") if what == "line" else life.watch.bytes(0, 1, life.now)

    assert life.wait(1000, speak).found == []


def test_log_that_does_not_grow_does_not_end_the_silence():
    life = trained()
    assert life.wait(200, lambda _: life.watch.bytes(0, 0, life.now)).kinds == ["no progress"]


def test_reading_and_writing_do_not_hide_a_hang():
    life = trained()

    def read(_):
        life.proc.bytes += 1 << 30

    assert life.wait(200, read).kinds == ["no progress"]


def test_silence_of_twice_the_longest_step_is_allowed():
    life = trained()
    life.wait(110)
    life.train(1)  # it took 113 s
    life.wait(220)
    assert life.found == []
    assert life.wait(10).kinds == ["no progress"]


def test_an_evaluation_between_steps_does_not_slow_the_pace_down():
    life = trained()
    life.say(EVALUATING).wait(900)
    life.train(6)
    assert life.wait(130).kinds == ["no progress"]


def test_the_progress_of_the_step_before_an_evaluation_comes_late():
    life = trained()
    life.say(EVALUATING)
    life.step += 1
    life.watch.progress({"step": life.step, "total": 1000}, life.now)
    assert life.watch.phase == "evaluating"
    assert life.wait(900).found == []
    life.train(6)
    assert life.wait(130).kinds == ["no progress"]


@pytest.mark.parametrize("announcement", [EVALUATING, SAVING, TOKENIZING, LOADING, "clusterctl: phase evaluating"])
@pytest.mark.parametrize("lines", [True, False])
def test_a_long_phase_is_no_hang(announcement, lines):
    """A quarter of an hour, and more, of evaluation, save, tokenisation."""
    trains = announcement in (EVALUATING, SAVING) or "clusterctl" in announcement
    life = trained() if trains else Life()
    life.say(announcement)
    assert life.watch.phase in ("evaluating", "saving", "tokenizing", "loading")
    assert life.wait(1790, lambda second: lines and second % 60 == 0 and life.say("...")).found == []
    if lines:
        assert life.wait(7200, lambda second: second % 1200 == 0 and life.say("...")).found == []


@pytest.mark.parametrize("announcement", [EVALUATING, SAVING])
def test_long_phase_with_disk_activity_is_no_hang(announcement):
    life = trained().say(announcement)

    def write(_):
        life.proc.bytes += 100_000

    assert life.wait(7200, write).found == []
    life.wait(1790)
    assert life.found == []
    assert life.wait(30).kinds == ["no progress"]


def test_threads_that_sample_the_machine_do_not_hide_a_hang():
    life = trained().say(SAVING)

    def sample(second):
        life.proc.bytes += 10_000

    life.wait(1850, sample)
    assert life.kinds == ["no progress"]
    assert life.found[0][1].text == "no output, no reads and no writes for 30 min (phase saving)"


def test_before_the_first_step():
    life = Life().say(RUNNING)
    assert life.wait(1790).found == []
    assert life.wait(30).kinds == ["no progress"]


def test_before_there_is_a_pace():
    life = Life().say(RUNNING).train(5)  # four times between five steps
    assert life.wait(1790).found == []
    assert life.wait(30).kinds == ["no progress"]


def test_six_steps_make_a_pace():
    assert Life().say(RUNNING).train(6).wait(122).kinds == ["no progress"]


def test_run_without_output_and_without_activity_is_a_hang():
    assert Life().wait(1790).found == []
    assert Life().wait(1820).kinds == ["no progress"]


def test_a_run_that_never_prints_but_works():
    life = Life()

    def work(_):
        life.proc.set(100, ticks=life.proc.table[100].ticks + silence.TICKS)

    assert life.wait(7200, work).found == []
    assert life.wait(1830).kinds == ["no progress"]  # it used much processor time once


def test_processors_that_are_busy_waiting_hide_no_hang():
    life = Life().say(LOADING)

    def spin(_):
        life.proc.set(100, ticks=life.proc.table[100].ticks + silence.TICKS)

    assert life.wait(1830, spin).kinds == ["no progress"]


def test_a_script_whose_evaluation_would_not_be_announced():
    """Its steps are known, but not what else it does: the pace must not judge it."""
    life = Life().train(20)
    assert life.watch.phase == "training"
    assert life.wait(1790).found == []
    assert life.wait(30).kinds == ["no progress"]


def test_the_lines_of_a_trainer_are_steps():
    life = Life().say(RUNNING)
    for _ in range(10):
        life.wait(30)
        for rank in range(4):  # log_on_each_node, or a script that prints on all ranks
            life.say("{'loss': '1.25', 'grad_norm': '0.5', 'learning_rate': '1e-05', 'epoch': '0.1'}", rank)
    assert life.wait(590).found == []
    ((_, hang),) = life.wait(20).found
    assert hang.text.endswith("there were 10 steps, and a step takes 30 s")


def test_steps_in_both_lines_and_events_are_counted_once():
    life = Life().say(RUNNING)
    for _ in range(10):
        life.train(1, seconds=30)
        life.say("{'loss': '1.25', 'epoch': '0.1'}").say(f"step={life.step}, skipped=0, lr=[0.1]")
    assert life.wait(590).found == []
    assert life.wait(20).kinds == ["no progress"]


@pytest.mark.parametrize("words", ["clusterctl: phase training", "***** Running training *****"])
def test_lines_of_deepspeed_make_a_pace_only_if_the_script_announces_phases(words):
    life = Life().say(words)
    for step in range(10):
        life.wait(3).say(f"[Rank 0] step={step}, skipped=0, lr=[0.1], mom=[0.9]")
    life.wait(130)
    assert life.kinds == (["no progress"] if words.startswith("clusterctl") else [])
    assert all("the last was step 9, and a step takes 3 s" in hang.text for _, hang in life.found)


@pytest.mark.parametrize("announced", [True, False])
def test_a_limit_of_the_user(announced):
    life = Life(hang={"after": 50, "policy": "stop"})
    if announced:
        life.say(RUNNING)
    life.wait(60)
    assert life.found == []  # not before the first step
    life.train(1)
    life.wait(49)
    assert life.found == []
    assert life.wait(2).kinds == ["no progress"]


def test_reading_does_not_lengthen_a_limit_of_the_user():
    life = Life(hang={"after": 300}).train(1)

    def read(_):
        life.proc.bytes += 1 << 30

    assert life.wait(302, read).kinds == ["no progress"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0.5 s"), (119, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2.0 h")]
)
def test_spans(seconds, text):
    assert silence.time_span(seconds) == text


def test_a_limit_of_the_user_is_for_training_and_lengthens_the_others():
    life = trained(hang={"after": 50})
    assert life.say(EVALUATING).wait(1790).found == []
    life = trained(hang={"after": 4000})
    assert life.say(EVALUATING).wait(3990).found == []
    assert life.wait(30).kinds == ["no progress"]


def test_after_the_last_step():
    life = trained()
    life.watch.progress({"step": 11, "total": 11}, life.now)
    assert life.watch.phase == "finishing"
    assert life.wait(1700).found == []


def test_only_node_rank_0_judges_progress():
    life = trained(node_rank=1, first_rank=4)
    assert life.wait(4000).found == []
    life.proc.set(103, state="T")
    assert life.wait(10).kinds == ["stopped"]


def test_delayed_agent_finds_no_hang():
    life = trained()
    life.proc.set(103, state="T")
    life.wait(3)
    life.now += 3600
    life.look()
    assert life.found == []
    life.wait(3)
    assert life.found == []
    assert life.wait(5).kinds == ["stopped"]
    life = trained()
    life.now += 36000
    life.look()
    assert life.wait(115).found == []


def test_a_step_after_a_sleep_of_the_machine_is_not_the_longest():
    life = trained()
    life.now += 3600
    life.train(6)
    assert life.wait(130).kinds == ["no progress"]
