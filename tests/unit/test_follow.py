"""Events of a run's agents become logs, progress and a verdict."""

import pytest

from provision.model import LogLine, Notice, Progress
from provision.run.follow import Follower, how, parsed


@pytest.fixture
def seen():
    return []


@pytest.fixture
def follower(tmp_path, seen):
    follower = Follower("r1", ["a", "b"], tmp_path, attempts=3, emit=seen.append)
    yield follower
    follower.close()


def tell(follower, name, *events):
    for event in events:
        follower.take(name, event)


FINISHED = {"event": "end", "state": "finished", "why": None}
STOPPED = {"event": "end", "state": "stopped", "why": None, "step": 7, "saved": True}


def log(rank, line):
    return {"event": "log", "rank": rank, "line": line}


def failed(node, text, rank=None):
    return {"event": "end", "state": "failed", "why": {"node": node, "rank": rank, "text": text}}


def notices(seen):
    return [event.text for event in seen if isinstance(event, Notice)]


def test_logs_and_losses_are_kept(follower, seen, tmp_path):
    tell(
        follower,
        "a",
        log(0, "hello"),
        log(None, "launching"),
        {"event": "progress", "step": 1, "total": 4, "loss": 6.5},
        {"event": "progress", "step": 4, "total": 4, "loss": 2.25},
        parsed("not an event"),
        {"event": "from the future"},
        FINISHED,
    )
    assert follower.state == "running"
    tell(follower, "b", log(1, "hi"), FINISHED)
    assert follower.state == "finished"
    assert (follower.losses, follower.steps) == ([6.5, 2.25], 4)
    assert (tmp_path / "a/rank0.log").read_text() == "hello\n"
    assert (tmp_path / "a/launcher.log").read_text() == "launching\nnot an event\n"
    assert (tmp_path / "b/rank1.log").read_text() == "hi\n"
    assert [event.line for event in seen if isinstance(event, LogLine)] == ["hello"]
    assert [(event.done, event.note) for event in seen if isinstance(event, Progress)] == [
        (1, "loss 6.5"),
        (4, "loss 2.25"),
    ]


def test_a_phase_of_rank_0_is_shown_beside_the_progress(follower, seen):
    tell(
        follower, "a", {"event": "progress", "step": 3, "total": 9, "loss": 1.0}, {"event": "phase", "phase": "saving"}
    )
    tell(follower, "b", {"event": "phase", "phase": "evaluating"})
    assert seen[-1] == Progress("train", 3, 9, "loss 1, saving")
    tell(follower, "a", {"event": "phase", "phase": "training"})
    assert seen[-1] == Progress("train", 3, 9, "loss 1")


def test_before_the_first_step_the_phase_is_shown(follower, seen):
    tell(follower, "a", {"event": "phase", "phase": "training"})
    assert seen[-1] == Progress("train", 0, None, "training")
    tell(follower, "a", {"event": "progress", "loss": 2.5})
    assert seen[-1] == Progress("train", 0, None, "loss 2.5")
    tell(follower, "a", {"event": "progress", "step": 4, "loss": 2.0})
    assert seen[-1] == Progress("train", 4, None, "loss 2")


def test_failure_names_the_node_and_shows_lines_that_arrive_after_the_end(follower):
    tell(follower, "a", log(0, "waiting"), failed("b", "rank 1 ended by SIGKILL", 1))
    assert follower.state == "running"
    tell(follower, "b", log(1, "CUDA out of memory"), failed("b", "rank 1 ended by SIGKILL", 1))
    assert follower.state == "failed"
    assert follower.failures == {"b": "rank 1 ended by SIGKILL\nCUDA out of memory"}


def test_an_unexplained_failure_reports_the_commands_exit_status(follower):
    tell(follower, "a", {"event": "exit", "rc": 3}, {"event": "end", "state": "failed", "why": None})
    assert follower.failures == {"a": "ended with exit code 3"}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"rc": 3}, "ended with exit code 3"),
        ({"rc": None, "signal": "SIGKILL"}, "ended by SIGKILL"),
        ({"rc": None, "error": "cannot start"}, "cannot start"),
    ],
)
def test_how_an_attempt_ended(event, message):
    assert how(event) == message


def test_an_agent_that_died_fails_the_run(follower):
    tell(follower, "a", FINISHED)
    tell(follower, "b", log(1, "step 1"), {"event": "gone"})
    assert follower.state == "failed"
    assert follower.states == {"a": "finished", "b": "lost"}
    assert "died without reporting" in follower.failures["b"]
    assert "step 1" in follower.failures["b"]


def test_later_events_of_a_lost_node_are_ignored(follower):
    follower.lost("b", "no connection")
    tell(follower, "b", FINISHED)
    tell(follower, "a", FINISHED)
    assert follower.over
    assert follower.failures == follower.unheard == {"b": "no connection"}
    assert follower.state == "running"  # no node is known to have failed


def test_informational_notice_is_no_warning(follower, seen):
    tell(follower, "a", {"event": "notice", "text": "copying", "level": "info"}, {"event": "notice", "text": "odd"})
    assert seen == [Notice("a: copying"), Notice("a: odd", "warning")]


def test_a_stop_knows_the_step_that_was_saved(follower):
    tell(follower, "a", STOPPED)
    tell(follower, "b", {**STOPPED, "saved": False, "step": None})
    assert (follower.state, follower.saved) == ("stopped", 7)


def test_run_has_started_when_every_node_has(follower):
    tell(follower, "a", {"event": "started", "pid": 1})
    assert not follower.started
    follower.turned.clear()
    tell(follower, "b", {"event": "started", "pid": 1})
    assert follower.started
    assert follower.turned.is_set()


def test_attempts_hangs_and_peers_are_reported(follower, seen):
    tell(
        follower,
        "a",
        {"event": "attempt", "attempt": 1, "checkpoint": None},
        {"event": "exit", "rc": 1, "left": [42]},
        {"event": "attempt", "attempt": 2, "checkpoint": "checkpoint-40"},
        {"event": "hang", "kind": "stopped", "rank": 1, "text": "it was stopped (SIGSTOP)"},
        {"event": "peer", "node": "b", "state": "lost", "text": "silent for 60 s"},
        {"event": "notice", "text": "the disk is full"},
        {"event": "dropped", "lines": 3},
    )
    tell(follower, "b", {"event": "attempt", "attempt": 2, "checkpoint": "checkpoint-40"})
    assert notices(seen) == [
        "a: processes that could not be killed: [42]",
        "a: ended with exit code 1",
        "attempt 2 of 3 from checkpoint-40",
        "a, rank 1 hangs: it was stopped (SIGSTOP)",
        "a reports b: silent for 60 s",
        "a: the disk is full",
        "a: 3 log lines arrived too fast; they are only in the log on the node",
    ]


def test_failure_of_an_earlier_attempt_is_not_the_reason(follower):
    tell(
        follower,
        "a",
        {"event": "exit", "rc": 3},
        {"event": "attempt", "attempt": 2},
        {"event": "end", "state": "failed", "why": None},
    )
    assert follower.failures == {"a": "failed without reporting a reason"}


@pytest.fixture
def with_spare(tmp_path, seen):
    follower = Follower("r1", ["a", "b", "c"], tmp_path, active=2, emit=seen.append)
    yield follower
    follower.close()


def test_a_replaced_node_no_longer_counts(with_spare, seen):
    first = {"event": "attempt", "attempt": 1, "nodes": ["a", "b"]}
    second = {"event": "attempt", "attempt": 2, "nodes": ["a", "c"], "checkpoint": "step-4"}
    tell(with_spare, "a", first, {"event": "started"})
    tell(with_spare, "b", first, {"event": "started"})
    assert with_spare.started
    tell(with_spare, "b", {"event": "gone"})
    assert "b" in with_spare.failures
    text = "its agent died without reporting"
    tell(with_spare, "a", {"event": "replaced", "node": "b", "spare": "c", "rank": 1, "text": text}, second)
    assert f"b lost ({text}): spare c takes rank 1" in notices(seen)
    assert (with_spare.members, with_spare.failures) == (("a", "c"), {})
    tell(with_spare, "c", {"event": "progress", "step": 5, "loss": 1.5}, FINISHED)
    assert with_spare.state == "running"
    tell(with_spare, "a", FINISHED)
    assert (with_spare.over, with_spare.state, with_spare.steps) == (True, "finished", 5)


def test_a_lost_spare_is_no_failure(with_spare):
    tell(with_spare, "c", {"event": "gone"})
    for name in "ab":
        tell(with_spare, name, FINISHED)
    assert (with_spare.state, with_spare.failures) == ("finished", {})


def test_a_node_that_was_replaced_and_reports_its_end_later_is_no_failure(with_spare):
    tell(with_spare, "a", {"event": "attempt", "attempt": 2, "nodes": ["a", "c"]})
    tell(with_spare, "b", failed("b", "the run continues without b"))
    for name in "ac":
        tell(with_spare, name, FINISHED)
    assert (with_spare.state, with_spare.failures) == ("finished", {})


@pytest.mark.parametrize("nodes", [None, "a", [], ["x"], [1, None]])
def test_invalid_nodes_of_an_attempt_change_nothing(with_spare, nodes):
    tell(with_spare, "a", {"event": "attempt", "attempt": 2, "nodes": nodes})
    assert with_spare.members == ("a", "b")
