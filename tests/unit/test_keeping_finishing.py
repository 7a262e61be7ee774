"""The copies after a program has ended: what ends the wait, and what is reported. The link is replaced."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.keeping import finishing
from trainer.agent.keeping.finishing import Finishing, decide, join, over
from trainer.agent.link import CopyError
from trainer.agent.run_files import NodePlan

LINK = {"host": "127.0.0.1", "port": 1, "token": "t", "nodes": ["n0", "n1"], "lost_after": 60.0}
JOB = {
    "name": "checkpoint-8", "single": False, "saved": 5, "step": 8, "addresses": {},
    "lists": {"1": [["a.pt", 100, 5, 0]], "0": []},
}  # fmt: skip


class Control:
    """What the main thread sees of the other agents; ``come`` is called at each look."""

    def __init__(self, come, fetch):
        self.stop, self.requests, self.broken, self.missing = None, 0, False, set()
        copies = types.SimpleNamespace(own_address=lambda: "127.0.0.1", addresses={})
        self.link = types.SimpleNamespace(copies=copies, fetch=fetch)
        self.all_nodes = LINK["nodes"]
        self.looks = 0
        self._come = come
        self._woken = threading.Event()

    def take(self):
        self.looks += 1
        self._come(self)

    def nudge(self):
        self._woken.set()

    def wait(self, seconds):
        self._woken.wait(min(seconds, 0.01))


class Log:
    def __init__(self):
        self.events, self.fields = [], {}

    def emit(self, event, **fields):
        self.events.append(dict(fields, event=event))

    def set(self, **fields):
        self.fields.update(fields)

    def note(self, **fields):
        self.fields.setdefault("noted", []).append(fields)

    def refresh(self, now):
        pass

    def texts(self):
        return [event["text"] for event in self.events if event["event"] == "notice"]


@pytest.fixture
def finish(tmp_path):
    (tmp_path / "out").mkdir()

    def run(position, come, fetch):
        data = plan_of(
            link=LINK, node=f"n{position}", node_rank=position, nnodes=2, resume={"output": "out"}, copies={}
        )
        control, log = Control(come, fetch), Log()
        answers = []

        def meet(offer, decision, patience, going, number):
            if number == 0:
                return dict(JOB)
            answers.append(offer)
            assert patience <= finishing.LIMIT + finishing.SLACK
            return decision({0: {"error": "", "bytes": 0}, 1: offer})

        plan = NodePlan(data, tmp_path, tmp_path / "plan.json")
        Finishing(plan, position, (0, 1), 2, 1, control, log, log).run({}, meet)
        return answers[0], log

    return run


def never(wanted, alive, on_bytes, done):
    """A node without power, or a disk that hangs."""
    on_bytes(40)
    threading.Event().wait(30)


def test_another_stop_ends_the_wait_at_once(finish):
    def come(control):
        if control.looks > 3:
            control.stop, control.requests = "user", 1

    answer, log = finish(1, come, never)
    assert answer["error"] == "the wait was ended"
    assert {"copying": "copying checkpoint-8 to n1: 40 %"} in log.fields["noted"]
    assert log.fields["copying"] is None
    assert any("checkpoint-8 is not copied to this node: the wait was ended" in text for text in log.texts())


def test_a_lost_peer_ends_the_wait_at_once(finish):
    def come(control):
        if control.looks > 3:
            control.missing.add("n0")

    assert finish(1, come, never)[0]["error"] == "the wait was ended"


def test_the_wait_is_bounded(finish, monkeypatch):
    monkeypatch.setattr(finishing, "LIMIT", 0.1)
    assert finish(1, lambda _: None, never)[0]["error"] == "it took more than 0 s"


def test_an_error_is_reported_on_the_node_and_by_rank_0(finish, monkeypatch):
    monkeypatch.setattr("trainer.agent.keeping.copier.PAUSE", 0.0)

    def fail(*_):
        raise CopyError("no connection to n0")

    answer, log = finish(1, lambda _: None, fail)
    assert answer["error"] == "no connection to n0"
    assert any("no connection to n0. What is in .clusterctl-copies/checkpoint-8@5" in text for text in log.texts())
    assert join({0: {"error": "", "bytes": 3}, 1: answer}) == {"complete": False, "bytes": 3 + answer["bytes"]}


def test_rank_0_reports_the_copies(finish):
    _, log = finish(0, lambda _: None, never)
    (event,) = [event for event in log.events if event["event"] == "copied"]
    assert (event["checkpoint"], event["step"], event["on"]) == ("checkpoint-8", 8, ["n0", "n1"])
    assert any("for at most 120 s; another stop ends it" in text for text in log.texts())


@pytest.mark.parametrize(
    ("stopping", "before", "requests", "stop", "ends"),
    [
        (False, 0, 0, None, False),
        (False, 0, 0, "relayed", True),  # the program ended alone, so the first stop is about the copies
        (True, 0, 1, "user", False),  # the request that stopped the program came here after another agent's
        (True, 1, 1, "user", False),
        (True, 1, 2, "user", True),
        (True, 0, 2, "signal", True),  # a signal counts twice
    ],
)
def test_which_stop_ends_the_wait(stopping, before, requests, stop, ends):
    control = types.SimpleNamespace(stop=stop, requests=requests)
    assert over(control, (stopping, before)) == ends


def test_nothing_is_copied_without_a_checkpoint_or_from_an_invalid_offer():
    empty = {"ranks": [0, 1], "kept": 0, "pointers": [], "others": [], "checkpoints": [], "copies": []}
    assert decide({0: empty, 1: dict(empty, ranks=[1, 1])}, (0, 1), 2, 1) == {}
    assert decide({0: {"checkpoints": 3}, 1: empty}, (0, 1), 2, 1) == {}
