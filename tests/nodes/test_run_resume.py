"""What was lost by a failure is what lies behind the newest complete checkpoint, and no more."""

import json
import re

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
