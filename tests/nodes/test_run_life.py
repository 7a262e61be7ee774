"""The life of a run, as its user sees it: train, status, logs, stop, resume, collect."""

import json
import re

import pytest
from training import wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

LONG = ("--output", "out", "tiny.py", "--", "--steps", "100000", "--output", "out")


@pytest.fixture(scope="module")
def detached(training_nodes):
    """A run that goes on while these tests look at it."""
    run = training_nodes.detached(*LONG)
    wait_until(lambda: "step 1 loss" in training_nodes.run("logs", run).stdout, "the first step", 120)
    yield run
    training_nodes.run("stop", run)


def test_a_detached_run_is_seen_by_status(training_nodes, detached):
    def mine():
        shown = json.loads(training_nodes.run("status", "--json").stdout)
        (run,) = [run for run in shown["runs"] if run["run"] == detached]
        return run

    wait_until(lambda: mine().get("step"), "status knows the step", 60)
    seen = mine()
    assert seen["state"] == "running"
    assert seen["nodes"] == ["node01", "node02"]


def test_status_finds_it_from_another_machine(training_nodes, detached, tmp_path):
    for name in ("inventory.yaml", "id_ed25519", "known_hosts"):
        (tmp_path / name).write_bytes((training_nodes.folder / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    import command

    shown = command.run("status", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert detached in shown.stdout
    one = command.run("status", detached, cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert "node01" in one.stdout
    assert "node02" in one.stdout


def test_logs_say_time_rank_and_line(training_nodes, detached):
    shown = training_nodes.run("logs", detached, "-n", "20")
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"step \d+ loss", shown.stdout), shown.stdout
    other = training_nodes.run("logs", detached, "--rank", "1")
    assert "rank 1 of 2" in other.stdout
    assert "rank 0 of 2" not in other.stdout


def test_a_second_resume_of_a_running_run_is_refused(training_nodes, detached):
    refused = training_nodes.run("resume", detached)
    assert refused.returncode in (2, 4), refused.stdout
    assert detached in refused.stderr


def test_a_run_that_is_not_there_is_a_mistake(training_nodes, detached):
    for what in ("stop", "logs", "resume", "collect"):
        refused = training_nodes.run(what, "no-such-run")
        assert refused.returncode == 2, (what, refused.stderr)
        assert "no-such-run" in refused.stderr
        assert detached in refused.stderr


def test_stop_is_proved_and_may_be_repeated(training_nodes, detached):
    stopped = training_nodes.run("stop", detached)
    assert stopped.returncode == 0, stopped.stderr
    assert "no process left" in " ".join(stopped.stdout.split())
    assert training_nodes.marked() == []
    again = training_nodes.run("stop", detached)
    assert again.returncode == 0, again.stderr


def test_more_nodes_than_there_are_is_a_mistake(training_nodes):
    refused = training_nodes.run("train", "--nodes", "3", *LONG)
    assert refused.returncode == 2
    assert "3" in refused.stderr
