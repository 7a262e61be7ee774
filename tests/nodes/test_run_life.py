"""The life of a run, as its user sees it: train, status, logs, stop, resume, collect."""

import json
import re
from pathlib import Path

import command
import pytest
from training import ROOT, RUNS, wait_until

from provision.inventory.loading import load
from provision.model import StageFinished
from provision.session import Session
from provision.tasks.status import status

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SHORT = ("--", "--steps", "5", "--pause", "0", "--output", "out")
LONG = ("--expected", "0.0001-0.0002", "--output", "out", "steps.py", "--", "--steps", "100000", "--output", "out")


@pytest.fixture(scope="module")
def detached(plain_nodes):
    """A run that continues during these tests."""
    run = plain_nodes.detached(*LONG)
    wait_until(lambda: "step 1 loss" in plain_nodes.run("logs", run).stdout, "the first step", 120)
    yield run
    plain_nodes.run("stop", run)


def test_a_detached_run_is_seen_by_status(plain_nodes, detached):
    def mine():
        shown = json.loads(plain_nodes.run("status", "--json").stdout)
        (run,) = [run for run in shown["runs"] if run["run"] == detached]
        return run

    wait_until(lambda: mine().get("step"), "status knows the step", 60)
    seen = mine()
    assert seen["state"] == "running"
    assert seen["nodes"] == ["node01", "node02"]


def test_status_finds_it_from_another_machine(plain_nodes, detached, tmp_path):
    for name in ("inventory.yaml", "id_ed25519", "known_hosts"):
        (tmp_path / name).write_bytes((plain_nodes.folder / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    shown = command.run("status", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert detached in shown.stdout
    one = command.run("status", detached, cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert "node01" in one.stdout
    assert "node02" in one.stdout


def test_the_runs_agents_tell_of_all_nodes(plain_nodes, detached):
    """As they are asked in a large cluster: one connection, and the same result as from every node directly."""
    inventory = load(plain_nodes.folder / "inventory.yaml")
    events = []
    with Session(inventory, emit=events.append) as session:
        told = status(session, direct=1)
    (stage,) = [event for event in events if isinstance(event, StageFinished) and event.stage == "agents"]
    assert list(stage.states.values()) == ["2 answers"]
    with Session(inventory) as session:
        asked = status(session)
    assert set(told.nodes) == set(asked.nodes) == set(told.offsets)
    assert [node.release for node in told.nodes.values()] == [node.release for node in asked.nodes.values()]
    assert told.users == asked.users
    assert list(told.runs) == list(asked.runs)
    for result in (told, asked):
        assert [(part.node, part.state, part.alive) for part in result.runs[detached].parts] == [
            ("node01", "running", True),
            ("node02", "running", True),
        ]


def test_logs_have_time_rank_and_line(plain_nodes, detached):
    shown = plain_nodes.run("logs", detached, "-n", "20")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"step \d+ loss", shown.stdout), shown.stdout
    other = plain_nodes.run("logs", detached, "--rank", "1")
    assert "rank 1 of 2" in other.stdout
    assert "rank 0 of 2" not in other.stdout


def test_a_second_resume_of_a_running_run_is_refused(plain_nodes, detached):
    refused = plain_nodes.run("resume", detached)
    assert refused.returncode in (2, 4), refused.stdout
    assert detached in refused.stderr


def test_an_unknown_run_is_a_usage_error(plain_nodes, detached):
    for what in ("stop", "logs", "resume", "diagnose", "collect"):
        refused = plain_nodes.run(what, "no-such-run")
        assert refused.returncode == 2, (what, refused.stderr)
        assert "no-such-run" in refused.stderr
        assert detached in refused.stderr


def test_a_run_that_is_slow_as_a_whole_is_reported(plain_nodes, detached):
    def status():
        return json.loads(plain_nodes.run("status", detached, "--json").stdout)

    wait_until(lambda: status()["slow"], "the agent judges the run", 120)
    seen = status()
    assert re.fullmatch(
        r"the run as a whole is slow: \S+ s a step, expected 0.0001 to 0.0002 s \(given by --expected\)", seen["slow"]
    )
    assert seen["measured"]["step_seconds"][1] > 0.0002
    diagnosed = plain_nodes.run("diagnose", detached)
    assert "the run as a whole is slow" in " ".join(diagnosed.stdout.split()), diagnosed.stdout + diagnosed.stderr


def test_stop_is_proved_and_may_be_repeated(plain_nodes, detached):
    stopped = plain_nodes.run("stop", detached)
    assert stopped.returncode == 0, stopped.stderr
    assert "no process left" in " ".join(stopped.stdout.split())
    assert plain_nodes.marked() == []
    again = plain_nodes.run("stop", detached)
    assert again.returncode == 0, again.stderr


def test_one_node_of_two_that_is_expected_to_be_as_fast_as_the_run_before(plain_nodes, detached):
    result = plain_nodes.run("train", "--limit", "node02", "--expected", detached, "steps.py", *SHORT)
    assert result.returncode == 0, result.stderr + result.stdout
    record = json.loads((plain_nodes.last_run() / "run.json").read_text())
    assert record["expected"]["basis"] == f"measured in {detached}"
    (log,) = plain_nodes.last_run().glob("*/rank*.log")
    assert log.parent.name == "node02"
    assert "rank 0 of 1, local rank 0" in log.read_text()


def test_a_dry_run_prints_each_nodes_command_and_starts_nothing(plain_nodes):
    before = sorted(plain_nodes.folder.glob("runs/*"))
    there = _written(plain_nodes)
    result = plain_nodes.run("train", "--nodes", "2", "--dry-run", "steps.py", *SHORT)
    assert result.returncode == 0, result.stderr
    assert "NODE_RANK=0" in result.stdout
    assert "NODE_RANK=1" in result.stdout
    assert "steps.py" in result.stdout
    assert sorted(plain_nodes.folder.glob("runs/*")) == before
    assert _written(plain_nodes) == there


def _written(nodes):
    """The files in the user's home and in /tmp of every node, with the times of the folders of runs."""
    found = {}
    for name in nodes.nodes:
        top = Path(nodes.box.node_root(name))
        places = [top / ROOT[1:], top / RUNS[1:]]
        found[name] = [(sorted(each.iterdir()), each.stat().st_mtime_ns) for each in places if each.exists()]
        found[name].append(sorted((top / "tmp").glob("*dry-run*")))
    return found
