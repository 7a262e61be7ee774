"""The first failure, as agents decide it: a killed rank comes before those that NCCL aborts for it."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from trainer.agent import processes, tracker
from trainer.agent.supervisor.decisions import judge

ABORTED = {"node": "a", "rank": 0, "text": "rank 0 was killed by SIGABRT", "signal": "SIGABRT", "time": 5.0}
KILLED = {"node": "b", "rank": 1, "text": "rank 1 was killed by SIGKILL", "time": 5.1}


def outcome(**changes):
    part = {"rc": None, "signal": None, "stopped": False, "failed": None, "killed": None, "left": [], "step": 3}
    return {**part, **changes}


def test_a_killed_rank_explains_the_abort_of_its_peer():
    outcomes = {0: outcome(failed=ABORTED), 1: outcome(failed=ABORTED, killed=KILLED)}
    assert judge(outcomes, ABORTED, more=False) == {"state": "failed", "why": KILLED, "step": 3}


@pytest.mark.parametrize("first", [dict(ABORTED, signal=None, text="the command exited with code 1"), KILLED])
def test_any_other_first_failure_is_kept(first):
    other = dict(KILLED, rank=7)
    assert judge({0: outcome(failed=first), 1: outcome(killed=other)}, first, more=False)["why"] == first


def test_an_unexplained_abort_is_kept():
    assert judge({0: outcome(failed=ABORTED), 1: outcome()}, ABORTED, more=False)["why"] == ABORTED


@pytest.fixture
def rank():
    """The tracked processes of a run that has one rank, and that rank's process."""
    mark = {processes.RUN: "one", "RANK": "3", "LOCAL_RANK": "0"}
    process = subprocess.Popen(["/bin/sleep", "600"], env=mark)
    seen = tracker.ProcessTracker("one", "a")
    while 3 not in seen.ranks.values():
        seen.look()
    with selectors.DefaultSelector() as selector:
        yield seen, process, selector
    process.kill()
    process.wait()
    seen.close()


def shown_as(monkeypatch, pid, **changes):
    """The state of one process from /proc, except some fields."""
    true = processes.stat_of

    def stat_of(asked):
        stat = true(asked)
        return stat._replace(**changes) if stat is not None and asked == pid else stat

    monkeypatch.setattr(tracker, "stat_of", stat_of)


def test_exiting_rank_counts_as_dead(rank, monkeypatch):
    seen, process, selector = rank
    assert seen.deaths(selector) == []
    shown_as(monkeypatch, process.pid, leaving=True, status=int(signal.SIGKILL))
    assert seen.deaths(selector) == [tracker.Death(3, process.pid, int(signal.SIGKILL))]


def test_unknown_exit_status_is_waited_for(rank, monkeypatch):
    seen, process, selector = rank
    shown_as(monkeypatch, process.pid, leaving=True, status=0)
    assert seen.deaths(selector) == []


def test_the_end_of_a_process_is_read_from_its_flags(monkeypatch):
    """Recorded (Linux 6.18): a process of 3 GB, half a second after SIGKILL."""
    line = (
        "985 (python3) R 944 941 4447 0 -1 4195404 786678 0 0 0 18 361 0 0 20 0 1 0 1342869 0 0 18446744073709551615 "
        "0 0 0 0 0 0 0 16781312 2 0 0 0 17 0 0 0 0 0 0 0 0 0 0 0 0 0 9"
    )
    monkeypatch.setattr(processes, "read", lambda _: line.encode())
    stat = processes.stat_of(985)
    assert (stat.state, stat.leaving, stat.status) == ("R", True, 9)
