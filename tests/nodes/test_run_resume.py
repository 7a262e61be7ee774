"""What was lost by a failure is what lies behind the newest complete checkpoint, and no more."""

import json
import re
import signal

import pytest
from training import RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(900)]


def log(training, run):
    """The lines of the trainer's own log on rank 0's node, as far as it is written."""
    shown = training.box.enter("node01", ["cat", f"{RUNS}/{run}/job/out/trainer_log.jsonl"]).stdout
    return [json.loads(line) for line in shown.splitlines(keepends=True) if line.endswith("\n")]


def losses(training, run):
    """By step; a repeated step counts with its last line."""
    return {line["current_steps"]: line["loss"] for line in log(training, run) if "loss" in line}


def test_llamafactory_goes_on_from_its_checkpoint_with_the_same_losses(training_nodes):
    config = (training_nodes.folder / "train.yaml").read_text()
    for key, value in (("save_steps", 5), ("max_steps", 26)):
        config = re.sub(rf"{key}: .*", f"{key}: {value}", config)
    (training_nodes.folder / "resumed.yaml").write_text(config)
    whole = training_nodes.run("train", "--nodes", "2", "resumed.yaml")
    assert whole.returncode == 0, whole.stderr + whole.stdout
    expected = losses(training_nodes, training_nodes.last_run().name)
    assert sorted(expected) == list(range(1, 27))

    broken = training_nodes.start("train", "--nodes", "2", "resumed.yaml", until=r"checkpoint-5\b")
    run = training_nodes.last_run().name
    wait_until(lambda: len(log(training_nodes, run)) >= 6, "six steps", 90)
    training_nodes.kill("node02", training_nodes.rank("node02"))
    assert broken.finish() == 6, broken.output
    resumed = training_nodes.run("resume", run)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert re.search(r"checkpoint-(5|10|15|20)\b", resumed.stdout + resumed.stderr)
    found = losses(training_nodes, run)
    assert sorted(found) == list(range(1, 27))
    # The broken run may have been faster than it was killed; what it had saved decides how many steps come again.
    for step in range(7, 27):
        assert found[step] == pytest.approx(expected[step], abs=1e-3), step


def test_a_torn_checkpoint_is_skipped_and_an_automatic_restart_recovers(training_nodes):
    restarted = training_nodes.start(
        *("train", "--nodes", "2", "--restarts", "2", "--output", "out", "--resume-arg", "--resume={checkpoint}"),
        *("tiny.py", "--", "--steps", "40", "--output", "out", "--save-every", "5"),
        until=r"step 12 ",
    )
    run = training_nodes.last_run().name
    out = f"{RUNS}/{run}/job/out"
    # What a full disk or a killed process leaves: the newest by its name, and half written.
    torn = f"cp -r {out}/checkpoint-10 {out}/checkpoint-99; truncate -s 100 {out}/checkpoint-99/model.safetensors"
    training_nodes.on("node01", "sh", "-c", torn)
    training_nodes.kill("node02", training_nodes.rank("node02"), signal.SIGKILL)
    assert restarted.finish(180) == 0, restarted.output
    assert re.search(r"rank 0 goes on from step 1[05]", restarted.output), restarted.output
    assert sorted(losses(training_nodes, run)) == list(range(1, 41))
    assert training_nodes.marked() == []


def test_collect_brings_checkpoints_and_logs_to_one_place(training_nodes, tmp_path):
    steps = ("--output", "out", "tiny.py", "--", "--steps", "10", "--output", "out", "--save-every", "5")
    saved = training_nodes.run("train", "--nodes", "2", *steps)
    assert saved.returncode == 0, saved.stderr
    run = training_nodes.last_run().name
    collected = training_nodes.run("collect", run, "--to", tmp_path)
    assert collected.returncode == 0, collected.stderr
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"run.log", "checkpoint-10", "model.safetensors"} <= names
    assert "checkpoint-5" not in names
    again = training_nodes.run("collect", run, "--to", tmp_path)
    assert again.returncode == 0, again.stderr


def test_a_run_of_two_nodes_resumes_on_one(training_nodes):
    """The second node's rank is killed and the node excluded: the run finishes on the first, at world size 1."""
    steps = ("tiny.py", "--", "--steps", "30", "--output", "out", "--save-every", "5")
    options = ("--nodes", "2", "--output", "out", "--resume-arg", "--resume={checkpoint}")
    broken = training_nodes.start("train", *options, *steps, until=r"step 7 ")
    run = training_nodes.last_run().name
    training_nodes.kill("node02", training_nodes.rank("node02"), signal.SIGKILL)
    assert broken.finish(180) == 6, broken.output
    resumed = training_nodes.run("resume", "--exclude", "node02", run)
    said = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, said
    assert f"run {run} resumes on 1 of 2 nodes: node01 is node 0; world size 1 instead of 2" in said
    assert re.search(r"rank 0 goes on from step \d+", said), said
    shown = json.loads(training_nodes.run("status", run, "--json").stdout)
    assert list(shown["parts"]) == ["node01"], shown
    assert training_nodes.marked() == []
