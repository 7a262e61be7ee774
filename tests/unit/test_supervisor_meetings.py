"""What an agent does when a meeting before an attempt fails; the link and the other agents are stand-ins."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.link import LinkError
from trainer.agent.run_files import Events, NodePlan, State
from trainer.agent.supervisor import meetings, supervisor
from trainer.agent.supervisor.control import STOPPING
from trainer.agent.supervisor.supervisor import END, MEETINGS, READY, Supervisor

DECISION = {
    "checkpoint": "checkpoint-2",
    "step": 2,
    "port": 23456,
    "world_size": 2,
    "members": [0, 1],
    "processes": [1, 1],
    "excluded": {},
    "copy": {"1": [["checkpoint-2/model", 1, 0]]},
}


class CancelledLink:
    """The meeting in which the checkpoint is prepared is cancelled; why arrives a moment later, if ever."""

    hub, is_hub = 0, False
    late: tuple = ()
    topics: tuple = ()

    def __init__(self, plan, wake):
        self._arrived = []
        CancelledLink.topics = ()

    def take(self):
        arrived, self._arrived = self._arrived, []
        return arrived

    def meet(self, offer, decide, patience, going, topic, tolerance):
        CancelledLink.topics += (topic,)
        if topic == MEETINGS + READY:
            self._arrived += self.late
            raise LinkError("n0: cancelled")
        return DECISION if topic == MEETINGS else {"state": "stopped", "why": None, "step": None, "saved": None}

    def start(self):
        pass

    def share(self, folder):
        pass

    def exclude(self, reasons):
        pass

    def send(self, kind, **fields):
        pass

    def close(self):
        pass


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """Makes the agent of a spare, whose signal handlers do not stay."""
    numbers = (*STOPPING, signal.SIGCHLD, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(supervisor, "Link", CancelledLink)
    monkeypatch.setattr(meetings, "RELAY", 0.1)
    link = {"host": "127.0.0.1", "port": 1, "token": "00" * 16, "nodes": ["n0", "n1", "n2"]}
    link["others"] = [["127.0.0.2", 2], ["127.0.0.3", 3]]
    resume = {"output": "out", "argv": ["resume={checkpoint}"]}
    data = plan_of(node="n2", node_rank=2, link=link, resume=resume, resuming=True)._replace(nnodes=2)
    plan = NodePlan(data, tmp_path, tmp_path / "plan.json")
    plan.logs.mkdir(parents=True, exist_ok=True)
    state = State(plan.logs, run="r", node="n2", excluded={})

    def run():
        Supervisor(plan, Events(plan.logs), state, None).run()
        return state.fields

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_failure_that_arrives_after_its_meeting_does_not_end_a_spare(spare, monkeypatch):
    failed = {"kind": "failed", "node": "n1", "attempt": 1, "text": "no space left"}
    monkeypatch.setattr(CancelledLink, "late", (failed,))
    assert spare()["state"] == "stopped"  # as the last meeting decided
    assert CancelledLink.topics == (MEETINGS, MEETINGS + READY, MEETINGS + END)


def test_a_meeting_that_fails_for_no_known_reason_ends_the_agent(spare):
    found = spare()
    assert (found["state"], found["why"]["text"]) == ("failed", "n0: cancelled")
