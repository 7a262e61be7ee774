"""What an agent does with the Slurm job of a run that is over, or that Slurm puts back into its queue."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from trainer.agent import slurm
from trainer.agent.run_files import NodePlan, State

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import free_port, plan_of

NODES = ("n0", "n1", "n2", "n3", "n4")
REQUEST = slurm.Request(("s1", "s2", "s3"), 2)
LOST = {"n0": "its agent exited"}
NOWHERE = "192.0.2.1"  # of TEST-NET-1, to which nothing can be sent


class Programs:
    """Stand-ins for Slurm's programs: the answers by name, one after the other; the last one stays."""

    def __init__(self, **answers):
        self.answers = {name: list(texts) for name, texts in answers.items()}
        self.calls = []

    def __call__(self, argv):
        self.calls.append(" ".join(argv))
        answers = self.answers.get(argv[0], [""])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def of(self, name):
        return [call for call in self.calls if call.startswith(name)]


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """Ends the job of a run of which ``state`` is written on the node at ``position``; returns the programs' calls."""

    monkeypatch.setattr(slurm, "CONNECT", 0.1)

    def end(programs, position=1, port=None, host=NOWHERE, **state):
        link = {"host": "127.0.0.1", "port": 999, "token": "x" * 16, "nodes": list(NODES)}
        link["others"] = [["127.0.0.1", 1000 + each] for each in range(4)]
        plan = plan_of(node=NODES[position], node_rank=position, nnodes=3, link=link)
        State(tmp_path).set(**{"state": "finished", "together": True, "excluded": LOST, "why": None, **state})
        env = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "s2", "SLURM_LAUNCH_NODE_IPADDR": host}
        env["SLURM_SRUN_COMM_PORT"] = str(port or free_port())
        waits = []
        slurm.end_job(NodePlan(plan, tmp_path, tmp_path / "plan.json"), env, programs, waits.append)
        assert all(0 < seconds <= 10 for seconds in waits)
        return programs

    return end


@pytest.mark.parametrize("state", [{}, {"state": "failed"}, {"excluded": {}}])
def test_a_run_whose_job_has_lost_srun_ends_the_job(ended, state):
    assert ended(Programs(), **state).calls == ["scancel --state=RUNNING 7"]


@pytest.mark.parametrize(
    ("position", "excluded", "cancels"),
    [(1, LOST, True), (3, LOST, True), (4, LOST, False), (1, {}, True), (2, {}, False)],
)
def test_only_some_agents_cancel_the_job(ended, position, excluded, cancels):
    assert bool(ended(Programs(), position, excluded=excluded).calls) == cancels


def test_a_job_that_still_has_srun_ends_without_help(ended, monkeypatch):
    assert ended(Programs(), host="127.0.0.1").calls == []  # on its own node
    monkeypatch.setattr(slurm, "is_own", lambda _: False)
    with socket.create_server(("127.0.0.1", 0)) as srun:
        assert ended(Programs(), host="127.0.0.1", port=srun.getsockname()[1]).calls == []
    assert ended(Programs(), host="127.0.0.1").calls != []


def test_an_agent_that_is_alone_cancels_only_a_job_without_other_nodes(ended):
    """The others may be training: this one waits until Slurm has taken the lost nodes from the job."""
    alone = {"state": "failed", "together": False, "why": {"node": "n1", "rank": None, "text": "no majority"}}
    programs = ended(Programs(squeue=["s[1-3]", None, "s[2-3]", "s2"]), **alone)
    assert [len(programs.of(name)) for name in ("squeue", "scancel")] == [4, 1]
    programs = ended(Programs(squeue=["s[1-3]", "s[2-3]", ""]), **alone)  # the others have ended it
    assert [len(programs.of(name)) for name in ("squeue", "scancel")] == [3, 0]


STATES = "s1|idle\ns2|completing\ns3|{}\n"


@pytest.mark.parametrize("state", ["down", "down*", "idle*", "drained", "draining@", "fail"])
def test_a_job_that_waits_again_does_not_wait_for_lost_nodes(state):
    programs = Programs(squeue=[""], sinfo=[STATES.format(state)])
    slurm.request_usable({"SLURM_JOB_ID": "7"}, REQUEST, programs)
    assert programs.calls[1:] == [
        "sinfo -h -N -n s1,s2,s3 -o %N|%T",
        "scontrol update JobId=7 ReqNodeList=s1,s2 NumNodes=2 NumTasks=2",
    ]


def test_a_job_that_started_without_a_lost_node_asks_for_it_when_it_is_back():
    programs = Programs(squeue=[""], sinfo=[STATES.format("idle")])
    slurm.request_usable({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, REQUEST, programs)
    assert programs.calls[2:] == ["scontrol update JobId=7 ReqNodeList=s1,s2,s3 NumNodes=3 NumTasks=3"]


@pytest.mark.parametrize(
    ("running", "states"),
    [
        ("7", STATES.format("down")),  # a running job would lose its nodes
        (None, STATES.format("down")),
        ("", STATES.format("mixed")),
        ("", "s1|idle\ns2|down\n"),  # too few
        ("", None),
    ],
)
def test_a_job_keeps_its_request(running, states):
    programs = Programs(squeue=[running], sinfo=[states])
    slurm.request_usable({"SLURM_JOB_ID": "7"}, REQUEST, programs)
    assert programs.of("scontrol") == []


def test_programs_that_fail_have_no_answer(monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER", 0.1)
    monkeypatch.setenv("SQUEUE_FORMAT", "x")
    assert slurm.run_program(["sh", "-c", "echo $SQUEUE_FORMAT"]) == "\n"
    assert [slurm.run_program(argv) for argv in (["false"], ["sleep", "9"], ["no-such-program"])] == [None] * 3
