"""The account of a run's time: made-up and recorded runs, and random events."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import pytest
from case_table import every_case

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import SAVE, Run, plan_of
from hypothesis import given
from hypothesis import strategies as st

from trainer.agent.account import Account, account
from trainer.agent.contract import effective
from trainer.agent.contract.effective import PARTS, Effective
from trainer.agent.supervisor.spent import KeptAccount
from trainer.agent.supervisor.supervisor import failures_in_row

RECORDED = Path(__file__).parent / "recorded_runs"


class Story:
    """The events of a run, by seconds since its start."""

    def __init__(self, start=1000.0):
        self.events, self.now, self.attempt = [], start, 1

    def add(self, event, after=0.0, **fields):
        self.now += after
        self.events.append({"event": event, "time": self.now, "attempt": self.attempt, **fields})
        return self

    def begin(self, after=1.0, checkpoint=None, **fields):
        """The nodes meet ``after`` seconds after the agent started."""
        began = self.now
        return self.add("attempt", after, checkpoint=checkpoint, began=began, **fields)

    def train(self, first, last, each=1.0):
        for step in range(first, last + 1):
            self.add("progress", each, step=step, total=1000)
        return self

    def save(self, seconds):
        return self.add("phase", phase="saving").add("phase", seconds, phase="training")

    def restart(self, detected=3.0, pause=2.0, **fields):
        self.add("notice", detected, kind="restart", text="attempt 1 of 9 failed")
        self.attempt += 1
        return self.add("attempt", pause, **fields)

    def result(self):
        return account(self.events)


def parts(found):
    return {name: round(value, 6) for name, value in found.parts() if round(value, 6)}


def test_a_run_without_failures():
    story = Story().begin().add("phase", 4, phase="loading").train(1, 30, each=2).add("phase", phase="finishing")
    found = story.add("end", 3, state="finished").result()
    # The first report of the first attempt is the end of the start: no pace is known yet.
    assert parts(found) == {"starting": 1 + 4 + 2 + 3, "training": 58}
    assert found.total == 68
    assert found.ratio == pytest.approx(58 / 68)
    assert (found.top, found.repeated, found.restarts, found.failures) == (30, 0, 0, 0)


def test_a_failure_is_recovering_waiting_and_repeating():
    story = Story().begin().train(1, 20).restart(checkpoint="checkpoint-15", step=15)
    story.add("phase", 6, phase="training").train(16, 30).add("end", state="finished")
    found = story.result()
    assert found.waiting == 2
    assert found.recovering == 3 + 6  # to its detection, and from the start to the first step
    assert found.repeating == 5
    assert found.repeated == 5
    assert found.training == 19 + 10
    assert (found.restarts, found.failures) == (1, 1)


def test_steps_between_two_reports_are_split_at_the_highest_one():
    story = Story().begin().add("progress", 1, step=1).train(2, 20).restart(checkpoint="c", step=10)
    found = story.add("progress", 20, step=30).add("progress", 10, step=40).result()
    assert (found.repeating, found.repeated) == (10, 10)
    assert found.training == 19 + 10 + 10


def test_a_failure_before_the_first_step_is_no_failure_of_the_machines():
    found = Story().begin().restart(checkpoint=None).train(1, 5).add("end", state="finished").result()
    assert (found.restarts, found.failures) == (1, 0)


def test_a_slow_step_is_no_part_of_a_save():
    story = Story().begin().train(1, 20).save(0.5)
    story.now += 30
    found = story.train(21, 40).add("end", state="finished").result()
    assert found.saving == 0.5


def test_a_save_costs_what_its_steps_took_beyond_the_pace():
    story = Story().begin().train(1, 20)
    for first in (21, 31, 41):
        story.add("phase", phase="saving")
        story.now += 1.5
        story.train(first, first).add("phase", phase="training")  # the phase ends at the next line, a step later
        story.train(first + 1, first + 9)
    found = story.train(51, 60).add("end", state="finished").result()
    assert found.saves == 3
    assert found.saving == pytest.approx(3 * 1.5, abs=0.1)
    assert found.save_cost == pytest.approx(1.5, abs=0.1)


def test_a_save_with_an_evaluation_costs_its_phase():
    story = Story().begin().train(1, 20).add("phase", phase="evaluating").add("phase", 30, phase="saving")
    found = story.add("phase", 2, phase="training").train(21, 30).add("end", state="finished").result()
    assert found.saving == 2
    assert found.training == 19 + 10 + 30


def test_a_save_after_the_last_step():
    story = Story().begin().train(1, 10).add("phase", phase="saving").add("phase", 4, phase="finishing")
    found = story.add("end", 1, state="finished").result()
    assert (found.saving, found.saves) == (4, 1)


def test_silence_of_a_node_that_stops_the_run_is_waiting():
    story = (
        Story().begin().train(1, 20).add("peer", 1, state="lost", node="n1").add("peer", 40, state="back", node="n1")
    )
    found = story.train(21, 30).add("end", state="finished").result()
    assert found.waiting == pytest.approx(40)
    running = Story().begin().train(1, 20).add("peer", state="lost", node="n1").train(21, 40)
    assert running.add("peer", state="back").train(41, 50).result().waiting == 0  # it trained meanwhile


def test_a_resume_accumulates_and_the_gap_is_no_part():
    story = Story().begin().train(1, 10).add("end", 1, state="failed")
    story.now += 3600
    found = story.begin(checkpoint="c", step=8).train(9, 20).add("end", state="finished").result()
    assert found.stopped == 3600
    assert found.total == pytest.approx(story.now - 1000 - 3600)
    assert found.repeated == 2
    assert found.recovering == 1 + 1  # the failure's last second, and the meeting of the next start
    stopped = Story().begin().train(1, 10).add("end", 1, state="stopped")
    assert stopped.begin(checkpoint="c", step=10).train(11, 20).result().recovering == 0


def test_an_agent_continues_the_account_of_the_one_before():
    story = Story().begin().train(1, 10).add("end", 1, state="failed")
    before = story.result()
    story.now += 50
    whole = story.begin(checkpoint="c", step=8).train(9, 20)
    own = Account(effective.read(before.to_object()), failed=True, ended=1000 + 1 + 10 + 1)
    own.begin(whole.now - 12 - 1)
    for event in whole.events[-13:]:
        own.take(event)
    assert own.effective() == whole.result()


def test_a_killed_agent_leaves_no_end():
    story = Story().begin().train(1, 10)
    story.now += 500
    found = story.begin(checkpoint="c", step=5).train(6, 12).result()
    assert found.stopped == 500
    assert found.repeated == 5


def test_phases_count_where_no_step_is_reported():
    story = Story().begin().add("phase", 5, phase="loading").add("phase", 5, phase="training")
    found = (
        story.add("phase", 80, phase="saving")
        .add("phase", 4, phase="training")
        .add("end", 6, state="finished")
        .result()
    )
    assert parts(found) == {"training": 86, "saving": 4, "starting": 11}
    assert found.ratio == pytest.approx(86 / 101)


def test_nothing_is_known_without_steps_and_phases():
    found = Story().begin().add("end", 60, state="finished").result()
    assert found.ratio is None
    assert found.total == 61
    assert account([{"event": "log", "time": 5.0, "line": "x"}]) is None
    assert account([]) is None


def test_the_time_since_the_last_event_counts():
    kept = Account()
    kept.begin(100.0)
    for event in Story(100.0).begin().train(1, 10).events:
        kept.take(event)
    assert kept.effective(111.0).training == 9
    assert kept.effective(115.0).training == 13  # a step is running
    assert kept.effective(115.0).total == 15
    assert kept.effective().total == 11


def test_the_account_of_a_lost_node_continues_on_another():
    """Rank 0's node is last heard after 20 steps, and lost 5 s later; the spare notices it 3 s after that."""
    rank0 = Account()
    for event in Story().begin().train(1, 20).events:
        rank0.take(event)
    spare = Account()
    for event in Story().begin().events:
        spare.take(event)
    known, mine = rank0.effective(1021.0), spare.effective(1021.0)
    spare.take({"event": "notice", "kind": "restart", "time": 1029.0})
    spare.take_over(known, mine, now=1031.0)
    taken = spare.effective(1031.0)
    assert parts(taken) == {"starting": 2, "training": 19, "recovering": 8, "waiting": 2}
    assert (taken.restarts, taken.failures, taken.top) == (1, 1, 20)
    story = Story(1032.0)
    story.attempt = 2
    for event in story.add("attempt", checkpoint="c", step=10).train(11, 30).add("end", state="finished").events:
        spare.take(event)
    found = spare.effective()
    assert found.total == 52
    assert (found.repeated, found.top) == (10, 30)
    assert found.training == pytest.approx(19 + 10)


def test_a_node_that_sees_the_steps_itself_keeps_its_account():
    own = Account()
    for event in Story().begin().train(1, 20).restart().events:
        own.take(event)
    before = own.effective(1030.0)
    own.take_over(Effective(training=5.0, top=6), before, now=1030.0)
    assert own.effective(1030.0) == before


ACCOUNTS = st.builds(
    Effective,
    **{name: st.floats(0, 1e10) for name in (*PARTS, "stopped")},
    **{name: st.integers(0, (1 << 53) - 1) for name in ("saves", "restarts", "failures", "repeated")},
    top=st.none() | st.integers(0, (1 << 53) - 1),
    pace=st.none() | st.floats(0, 1e10),
)


@given(ACCOUNTS, st.floats(0, 1e6), st.booleans())
def test_any_account_of_another_node_continues_as_a_valid_one(known, seconds, failed):
    spare = Account()
    for event in Story().begin().events:
        spare.take(event)
    mine = spare.effective(1001.0)
    if failed:
        spare.take({"event": "notice", "kind": "restart", "time": 1001.0 + seconds / 2})
    spare.take_over(known, mine, now=1001.0 + seconds)
    found = spare.effective(1001.0 + seconds)
    assert found.total == pytest.approx(known.total + seconds)
    assert effective.read(found.to_object()) is not None


@pytest.mark.parametrize("value", [None, "x", {}, {"version": 1, "training": -1}, {"version": 1, "top": True}])
def test_an_invalid_account_of_another_node_changes_nothing(value):
    kept = KeptAccount({})
    kept.hear("n0", {"version": 1, "training": 100.0, "top": 5})
    kept.hear("n0", value)
    kept.adopt("n2", ["n0", "n1"], ["n2", "n1"])
    assert kept.to_object()["training"] == 100
    kept.hear("n0", value)
    kept.adopt("n2", ["n0", "n1"], ["n2", "n1"])
    assert kept.to_object()["training"] == 100


@pytest.mark.parametrize(
    ("node", "before", "after", "taken"),
    [
        ("n3", "n0 n1 n2", "n3 n1 n2", "n0"),
        ("n3", "n0 n1 n2", "n0 n1 n3", "n2"),
        ("n3", "n0 n1 n2", "n0 n3 n2", None),  # neither the first nor the last
        ("n1", "n0 n1 n2", "n0 n1", "n2"),  # fewer nodes
        ("n1", "n0 n1 n2", "n1 n2", "n0"),
        ("n0", "n0 n1 n2", "n0 n1 n2", None),
        ("n2", "n0 n1", "n2", "n1"),  # both are lost: the newest steps count
    ],
)
def test_a_node_continues_the_account_of_the_one_whose_place_it_has(node, before, after, taken):
    kept = KeptAccount({})
    for number in (0, 1, 2):
        kept.hear(f"n{number}", {"version": 1, "training": 100.0 + number, "top": 5})
    kept.adopt(node, before.split(), after.split())
    assert kept.to_object()["training"] == pytest.approx(100 + int(taken[1:]) if taken else 0, abs=0.5)


def test_the_last_rank_sends_its_account_only_if_its_ranks_print_steps():
    class Link:
        def __init__(self):
            self.sent = []

        def send(self, kind, **fields):
            self.sent.append((kind, fields["spent"]["version"]))

    link = Link()
    for rank in range(4):
        KeptAccount({}).share(link, rank, 4)
    assert len(link.sent) == 1
    printing = KeptAccount({})
    printing.take({"event": "attempt", "attempt": 1, "time": time.time()})
    for step in (1, 2):
        printing.take({"event": "progress", "step": step, "time": time.time()})
    printing.share(link, 3, 4)
    printing.share(link, 3, 4)  # too early
    printing.share(link, 2, 4, last=True)
    assert len(link.sent) == 2
    printing.share(link, 3, 4, last=True)
    assert len(link.sent) == 3


def test_a_launcher_that_restarts_its_ranks_itself_repeats_steps():
    found = (
        Story().begin().train(1, 20).add("progress", 30, step=11).train(12, 25).add("end", state="finished").result()
    )
    assert found.recovering == 30
    assert found.repeated == 9


@every_case("case", sorted(path.name for path in RECORDED.iterdir() if path.is_dir()))
def test_recorded_runs(case):
    for path in sorted((RECORDED / case).glob("*/events.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
        found = account(events)
        assert found is None or valid(found)


def valid(found):
    """Whether the parts are parts of the total, and everything can be written and read."""
    assert all(math.isfinite(value) and value >= 0 for _, value in found.parts())
    assert found.total == pytest.approx(sum(value for _, value in found.parts()))
    assert found.ratio is None or 0 <= found.ratio <= 1
    assert found.stopped >= 0
    assert effective.read(json.loads(json.dumps(found.to_object()))) is not None
    return True


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.none(), max_size=1)
)
TIMES = st.one_of(st.floats(0, 1e6), VALUES)
EVENTS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"event": st.just("attempt"), "time": TIMES, "attempt": st.one_of(st.integers(1, 3), VALUES)},
            optional={"step": VALUES, "began": TIMES, "checkpoint": VALUES},
        ),
        st.fixed_dictionaries(
            {"event": st.just("progress"), "time": TIMES, "step": st.one_of(st.integers(0, 50), VALUES)}
        ),
        st.fixed_dictionaries(
            {
                "event": st.just("phase"),
                "time": TIMES,
                "phase": st.sampled_from(["training", "saving", "evaluating", "x"]),
            }
        ),
        st.fixed_dictionaries({"event": st.just("peer"), "time": TIMES, "state": st.sampled_from(["lost", "back"])}),
        st.fixed_dictionaries(
            {"event": st.just("notice"), "time": TIMES, "kind": st.one_of(st.just("restart"), VALUES)}
        ),
        st.fixed_dictionaries(
            {"event": st.just("end"), "time": TIMES, "state": st.sampled_from(["failed", "stopped"])}
        ),
    ),
    max_size=40,
)


@given(EVENTS)
def test_any_events_give_a_valid_account(events):
    found = account(events)
    assert found is None or valid(found)


@given(st.lists(st.floats(-5, 20), min_size=1, max_size=30), st.data())
def test_all_time_is_accounted_even_if_the_clock_goes_back(waits, data):
    """The total is the time of the clock that never goes back."""
    story = Story().begin(after=0.0)
    step, highest = 0, story.now
    for wait in waits:
        kind = data.draw(st.sampled_from(["progress", "phase", "restart"]))
        story.now = max(0.0, story.now)
        if kind == "progress":
            step += 1
            story.add("progress", wait, step=step)
        elif kind == "phase":
            story.add("phase", wait, phase=data.draw(st.sampled_from(["saving", "training"])))
        else:
            story.add("notice", wait, kind="restart")
            step = data.draw(st.integers(0, step))
            story.attempt += 1
            story.add("attempt", checkpoint="c", step=step)
        highest = max(highest, story.now)
    found = story.add("end", state="failed").result()
    assert valid(found)
    assert found.total == pytest.approx(max(highest, story.now) - 1000, abs=1e-6)


@given(st.dictionaries(st.sampled_from([*PARTS, "version", "saves", "top", "pace", "stopped"]), VALUES))
def test_an_account_of_a_node_is_read_or_refused(value):
    found = effective.read({"version": 1, **value})
    assert found is None or valid(found)


def test_a_wrong_account_is_refused_with_its_key():
    with pytest.raises(effective.UntrustedError, match="training must be seconds"):
        effective.from_object({"version": 1, "training": float("nan")})
    with pytest.raises(effective.UntrustedError, match="only version 1"):
        effective.from_object(dict(Effective().to_object(), version=2))
    assert effective.read([]) is None


# A trainer that saves after the fourth step, dies after the sixth in its first attempt, and repeats two steps.
TRAINER = (
    SAVE
    + """
import os, time
found = os.environ.get("CHECKPOINT", "")
first = int(found.rpartition("-")[2]) if found else 0
for step in range(first + 1, 11):
    time.sleep(0.3)
    print("step %d/10 | loss: 1.0" % step, flush=True)
    if step == 4 and not found:
        print("clusterctl: phase saving", flush=True)
        save(4, rank=None)
        print("clusterctl: phase training", flush=True)
    if step == 6 and not found:
        os.kill(os.getpid(), 9)
"""
)


def test_an_agent_accounts_for_a_restart_and_a_resume(tmp_path):
    run = Run(tmp_path)
    resume = {"output": "out", "env": {"CHECKPOINT": "{checkpoint}"}}
    try:
        run.start(TRAINER, restarts=1, backoff=0.5, resume=resume)
        assert run.until("end")["state"] == "finished"
        run.agent.wait(60)
        events = run.events()
        end = events[-1]
        found = effective.read(end["spent"])
        assert (found.restarts, found.failures, found.saves) == (1, 1, 1)
        assert found.top == 10
        assert found.repeated == 2
        assert 0.4 <= found.waiting <= 10
        assert found.training > 1
        assert found.recovering > 0
        state = run.state()
        assert found.total == pytest.approx(state["time"] - state["began"], abs=1.0)
        assert valid(account(events))
        assert account(events).repeated == 2
        run.close()
        # A resume has nothing left to do, and keeps the account.
        run.start("pass", resume=resume, resuming=True)
        again = effective.read(run.finish()[-1]["spent"])
        assert (again.top, again.repeated, again.restarts) == (10, 2, 1)
        assert again.total >= found.total
        assert again.stopped > 0
    finally:
        run.close()


def test_the_pause_before_a_restart_starts_again_after_a_long_attempt():
    pauses, failures = [], 0
    for seconds in (3, 3, 3, 600, 3):
        failures = failures_in_row(failures, seconds)
        pauses.append(plan_of().pause(failures))
    assert pauses == [1, 2, 4, 1, 2]


def test_an_attempt_with_new_steps_shortens_the_pause_before_a_restart():
    pauses, failures = [], 0
    for new_steps in (False, False, True, True, False):
        failures = failures_in_row(failures, 3, new_steps=new_steps)
        pauses.append(plan_of().pause(failures))
    assert pauses == [1, 2, 1, 1, 2]
