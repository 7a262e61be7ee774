"""A run is followed: logs and losses are kept, and the first node that fails stops the others."""

import json
import threading

import pytest

from provision.model import LogLine, Node, Notice, Progress, Result
from provision.run.follow import Follower

A, B = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")


class Agent:
    """A remote whose agent prints the given events, then waits for its stdin to end when ``waits``."""

    def __init__(self, node, events, *, waits=False, last=None):
        self.node, self.events, self.waits, self.last = node, events, waits, last

    def run(self, script, *, stdin, on_line, deadline=None):
        for event in self.events:
            on_line(event if isinstance(event, str) else json.dumps(event))
        if self.waits:
            assert list(stdin) == []
        if self.last:
            on_line(json.dumps(self.last))
        return Result(0, "", "boom")


@pytest.fixture
def seen():
    return []


@pytest.fixture
def follower(tmp_path, seen):
    follower = Follower("r1", [A, B], tmp_path, grace=1, emit=seen.append)
    yield follower
    follower.close()


def both(follower, one, two):
    threads = [threading.Thread(target=follower.follow, args=(agent.node, agent, "")) for agent in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


DONE = {"event": "exit", "rc": 0}
STOPPED = {"event": "exit", "rc": None, "signal": "SIGTERM", "stopped": True}


def test_logs_and_losses_are_kept(follower, seen, tmp_path):
    events = [
        {"event": "log", "rank": 0, "line": "hello"},
        {"event": "log", "rank": None, "line": "launching"},
        {"event": "progress", "step": 1, "total": 4, "loss": 6.5},
        {"event": "progress", "step": 4, "total": 4, "loss": 2.25},
        "not an event",
        {"event": "from the future"},
    ]
    both(follower, Agent(A, events, last=DONE), Agent(B, [{"event": "log", "rank": 1, "line": "hi"}], last=DONE))
    assert follower.state == "finished"
    assert (follower.losses, follower.steps) == ([6.5, 2.25], 4)
    assert (tmp_path / "a/rank0.log").read_text() == "hello\n"
    assert (tmp_path / "a/launcher.log").read_text() == "launching\nnot an event\n"
    assert (tmp_path / "b/rank1.log").read_text() == "hi\n"
    assert [event.line for event in seen if isinstance(event, LogLine)] == ["hello"]
    assert [event.done for event in seen if isinstance(event, Progress)] == [1, 4]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"event": "exit", "rc": 3}, "exit code 3"),
        ({"event": "exit", "rc": None, "signal": "SIGKILL"}, "ended by SIGKILL"),
        ({"event": "exit", "rc": None, "error": "cannot start"}, "cannot start"),
        (None, "without a word: boom"),
    ],
)
def test_a_failure_stops_the_other_node_and_keeps_the_last_lines(follower, last, message):
    crash = Agent(B, [{"event": "log", "rank": 1, "line": "CUDA out of memory"}], last=last)
    both(follower, Agent(A, [], waits=True, last=STOPPED), crash)
    assert follower.state == "failed"
    assert follower.states == {"a": "stopped", "b": "failed"}
    assert list(follower.failures) == ["b"]
    assert message in follower.failures["b"]
    assert "CUDA out of memory" in follower.failures["b"]


def test_a_stop_reaches_every_node(follower):
    threads = [
        threading.Thread(target=follower.follow, args=(node, Agent(node, [], waits=True, last=STOPPED), ""))
        for node in (A, B)
    ]
    for thread in threads:
        thread.start()
    assert follower.stop_and_wait() == []
    assert follower.state == "stopped"


def test_a_process_that_nothing_could_end_is_told(follower, seen):
    both(follower, Agent(A, [], last={**DONE, "left": [42]}), Agent(B, [], last=DONE))
    assert any(isinstance(event, Notice) and "42" in event.text for event in seen)
