"""A training as it is asked for: its nodes, its plans, and what becomes of it."""

import json
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from provision.errors import InterruptedByUser, NodesFailedError, RunFailedError, UsageError
from provision.inventory import load
from provision.model import Node, Result
from provision.run import Facts, Job, Launch, RunSpec, Worker, new_run_id
from provision.run.record import output_of
from provision.session import Session
from provision.summaries.runs import train_output
from provision.tasks.resume import refuse_plans, renewed
from provision.tasks.start import Following, Start
from provision.tasks.train import Training, find_config, linked, run_id, visible
from trainer.agent.contract.plan import Link, Plan, Resume

PROVED = '{"event": "stopped", "left": []}\nproved processes\nproved ports\nproved gpus\n'
NAMES = ("node01", "node02")


@pytest.fixture
def inventory(tmp_path):
    (tmp_path / "inventory.yaml").write_text("prefix: /x/current\nnodes: {node01: 10.0.0.1, node02: 10.0.0.2}\n")
    return load(tmp_path / "inventory.yaml")


def plans(**more):
    given = {
        "run": "r1",
        "nnodes": 2,
        "processes": 4,
        "env": {"MASTER_PORT": "1"},
        "prefix": "/x/releases/1",
        "port": 1,
    }
    fields = {"argv": ("x",), **given, **more}
    return [Plan(node=name, node_rank=rank, **fields) for rank, name in enumerate(NAMES)]


# --- plans ---------------------------------------------------------------------------------------


def spec(*names):
    workers = tuple(Worker(Node(name, name), Facts()) for name in names)
    return RunSpec("r1", workers, PurePosixPath("/p"), PurePosixPath("/f"), "c.yaml", "10.0.0.1", 1)


def test_several_nodes_are_linked_through_rank_0_and_one_is_not():
    found = linked(Launch(tuple(plans())), spec(*NAMES), 4711, "00ff", 5.0)
    link = Link("10.0.0.1", 4711, "00ff", NAMES, 5.0)
    assert [plan.link for plan in found] == [link, link]
    assert linked(Launch(tuple(plans()[:1])), spec("node01"), None, "00ff", 5.0)[0].link is None
    with pytest.raises(UsageError, match="no second free port"):
        linked(Launch(tuple(plans())), spec(*NAMES), None, "00ff", 5.0)


def test_resume_has_new_ports_and_a_new_token_and_keeps_the_rest():
    link = Link("h", 2, "old", NAMES)
    old = plans(link=link, resume=Resume("job/out"), restarts=1, none_ok=True)
    new = renewed(old, Facts(port=11, link_port=12), token="new")
    assert [(plan.port, plan.env["MASTER_PORT"], plan.restarts) for plan in new] == [(11, "11", 1)] * 2
    assert new[1].link == link._replace(port=12, token="new")
    assert all(plan.resuming and not plan.none_ok for plan in new)
    assert renewed(old, Facts(), token="t", restarts=3)[0].restarts == 3
    assert old[0].env == {"MASTER_PORT": "1"}
    with pytest.raises(UsageError, match="run r1 cannot be resumed") as caught:
        refuse_plans(plans(resume=None))
    assert "--resume-arg" in caught.value.hint


@pytest.mark.parametrize(
    ("job", "env", "expected"),
    [
        (Job(), {}, {}),
        (Job(), {"CUDA_VISIBLE_DEVICES": "2,3"}, {"node01": "2,3", "node02": "2,3"}),
        (Job(env={"CUDA_VISIBLE_DEVICES": "1"}), {"CUDA_VISIBLE_DEVICES": "2"}, {"node01": "1", "node02": "1"}),
        (Job(include={"node01": ("0", "2"), "node02": ()}), {}, {"node01": "0,2"}),
        (Job(per_node=2), {}, {"node01": "0,1", "node02": "0,1"}),
    ],
)
def test_the_gpus_that_a_job_will_use(inventory, job, env, expected):
    assert visible(job, inventory.nodes, env) == expected


def test_name_is_part_of_the_id_or_refused():
    assert "-first-try-" in run_id(Training(Job(target="x/sft.yaml"), name="first_try"))
    assert "-sft-" in run_id(Training(Job(target="x/sft.yaml")))
    with pytest.raises(UsageError, match="--name two words") as caught:
        run_id(Training(Job(), name="two words"))
    assert caught.value.hint == "--name two-words"


def test_default_config_is_train_yaml(inventory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no train\.yaml in this folder"):
        find_config(inventory)
    (tmp_path / "train.yaml").touch()
    assert str(find_config(inventory)) == "train.yaml"


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"resume": Resume("job/out")}, "/f/job/out"),
        ({"resume": Resume("/data/out")}, "/data/out"),
        ({"progress": "job/o/trainer_log.jsonl"}, "/f/job/o"),
        ({}, "/f"),
    ],
)
def test_folder_of_the_trained_model(fields, output):
    assert output_of(plans(**fields)[0], "/f") == output


# --- starting ------------------------------------------------------------------------------------


@dataclass
class Remote:
    """A node whose agent starts as ``start`` defines, and then emits ``events``."""

    node: Node
    start: Result | Exception
    events: tuple
    stops: list

    def run(self, script, *, stdin=None, on_line=None, deadline=None, root=False):
        if "agent start" in script:
            if isinstance(self.start, Exception):
                raise self.start
            return self.start
        if "agent stop" in script:
            self.stops.append(self.node.name)
            return Result(0, PROVED)
        for event in self.events:
            on_line(json.dumps(event))
        return Result(0, "")

    def close(self):
        pass


@pytest.fixture
def go(inventory):
    """Starts a run on two nodes; ``go.stops`` are those that got a stop."""

    def go(*events, starts=(), following=None, **more):
        go.stops = []
        nodes = inventory.nodes
        starts = dict(starts)
        ok = Result(0, '{"started": true, "at": 7}\n')
        remotes = {
            node.name: Remote(node, starts.get(node.name, ok), reported, go.stops)
            for node, reported in zip(nodes, events, strict=True)
        }

        class Connections:
            def __getitem__(self, node):
                return remotes[node.name]

        about = {"folder": "/x/runs/r1", "master": "m:1", "prefix": "/x/releases/1"}
        session = Session(inventory, connections=Connections())
        return Start(session, nodes, "r1", plans(**more), about).follow(following or Following())

    return go


def record(inventory):
    return json.loads((inventory.path.parent / "runs/r1/run.json").read_text())


STARTED = {"event": "started", "pid": 1}
FINISHED = {"event": "end", "state": "finished"}


def test_a_run_that_finishes_is_recorded_and_shown(go, inventory):
    steps = [{"event": "progress", "step": n, "total": 2, "loss": loss} for n, loss in ((1, 4.0), (2, 2.5))]
    result = go((STARTED, *steps, FINISHED), (STARTED, FINISHED), resume=Resume("job/out"))
    kept = record(inventory)
    assert (kept["state"], kept["losses"], kept["nodes"]) == ("finished", [4.0, 2.5], list(NAMES))
    assert kept["plans"]["node02"]["node_rank"] == 1
    data, text = train_output(result)
    assert text.splitlines()[1:] == [
        "checkpoint in node01:/x/runs/r1/job/out",
        f"trained on node[01-02] (world size 8): 2 steps, loss 4 -> 2.5, {result.seconds:.0f} s",
    ]
    assert data["state"] == "finished"
    assert go.stops == []


def test_unknown_facts_of_a_script_are_not_shown(go):
    result = go((STARTED, FINISHED), (STARTED, FINISHED))
    text = train_output(result)[1]
    assert "checkpoint" not in text
    assert "?" not in text
    assert "all of the run in node01:/x/runs/r1" in text


def test_a_detached_run_continues_and_the_commands_to_return_are_printed(go, inventory):
    held = {"event": "notice", "text": "more to come"}
    result = go((STARTED, held), (STARTED,), following=Following(detach=True))
    assert (result.state, record(inventory)["state"], record(inventory)["attached"]) == ("detached", "running", False)
    text = train_output(result)[1]
    assert "clusterctl logs -f r1" in text
    assert "clusterctl stop r1" in text


def test_an_agent_that_cannot_be_started_stops_all_others(go, inventory):
    bad = Result(1, '{"started": false, "error": "another agent owns the run"}\n')
    with pytest.raises(RunFailedError, match="could not be started; every node was stopped") as caught:
        go((), (), starts={"node02": bad})
    assert caught.value.reasons == {"node02": "another agent owns the run"}
    assert sorted(go.stops) == list(NAMES)
    assert record(inventory)["state"] == "failed"


def test_a_failed_run_reports_the_place_and_the_next_command(go, inventory):
    why = {"event": "end", "state": "failed", "why": {"node": "node02", "rank": 5, "text": "ended by SIGKILL"}}
    with pytest.raises(RunFailedError, match="run r1 failed; every node was stopped") as caught:
        go((STARTED, why), (STARTED, why), resume=Resume("out"))
    assert caught.value.reasons == {"node02": "rank 5: ended by SIGKILL"}
    assert "clusterctl diagnose r1" in caught.value.hint
    assert "clusterctl resume r1" in caught.value.hint
    assert record(inventory)["why"] == caught.value.reasons
    assert record(inventory)["named"] == {"node02": 1}


def test_unreachable_run_may_still_be_running(go, inventory):
    with pytest.raises(
        NodesFailedError, match=r"node\[01-02\] can no longer be reached; run r1 may still be running"
    ) as caught:
        go((), ())
    assert caught.value.hint == "clusterctl logs -f r1; clusterctl status r1"
    assert record(inventory)["state"] == "running"
    assert go.stops == []


def test_run_stopped_by_another_command_is_reported_as_stopped(go, inventory):
    end = {"event": "end", "state": "stopped", "saved": True, "step": 30}
    with pytest.raises(InterruptedByUser, match="stopped on every node; its work is saved at step 30") as caught:
        go((STARTED, end), (STARTED, {**end, "saved": False}))
    assert caught.value.hint == ""  # where its checkpoints are is not known: nothing to resume
    assert record(inventory)["state"] == "stopped"


def test_ctrl_c_while_the_agents_are_started_leaves_none(go):
    with pytest.raises(InterruptedByUser, match="run r1 was interrupted and stopped on every node"):
        go((), (), starts={"node01": InterruptedByUser("interrupted")})
    assert sorted(go.stops) == list(NAMES)


def test_an_id_sorts_by_time_and_is_safe():
    from datetime import datetime, timezone

    when = datetime(2026, 11, 21, 7, 15, tzinfo=timezone.utc)
    assert new_run_id(when, "a/Ümlaut x.yaml").startswith("20261121-071500-mlaut-x-")


def test_unknown_answer_of_an_agent_is_reported(go):
    with pytest.raises(RunFailedError) as caught:
        go((), (), starts={"node01": Result(127, "", "python: not found")})
    assert caught.value.reasons == {"node01": "python: not found"}
