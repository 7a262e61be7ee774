"""A stop that keeps the work."""

import json
import re

import pytest
from training import wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

OUT = "/home/trainer/llm/runs/{run}/job/out"


@pytest.fixture
def training(training_nodes, tmp_path):
    """A folder of its own; the runs that a test leaves are ended."""
    own = training_nodes.own(tmp_path / "job")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


def logged(training, run):
    """The steps of the trainer's own log on rank 0's node, in the order of its lines."""
    said = training.box.enter("node01", ["cat", OUT.format(run=run) + "/trainer_log.jsonl"]).stdout
    return [json.loads(line)["current_steps"] for line in said.splitlines() if line.endswith("}")]


def test_a_stop_that_saves_says_the_step_and_resume_goes_on_from_it(training):
    config = training.config("saving.yaml", enable_jit_checkpoint="true", save_steps=100000, max_steps=100000)
    run = training.detached(config)
    wait_until(lambda: len(logged(training, run)) >= 3, "it trains", 120)
    stopped = training.run("stop", "--save", run)
    assert stopped.returncode == 0, stopped.stderr
    step = int(re.search(r"saved at step (\d+)", stopped.stdout)[1])
    assert training.marked(run=run) == []
    for node in training.nodes:  # each has its own disk, and its own part of the checkpoint
        names = training.on(node, "ls", f"{OUT.format(run=run)}/checkpoint-{step}").split()
        assert f"rng_state_{training.nodes.index(node)}.pth" in names
    before = logged(training, run)
    resumed = training.start("resume", run, until=rf"checkpoint-{step}")
    wait_until(lambda: logged(training, run)[len(before) :], "it trains again", 120)
    assert logged(training, run)[len(before)] == step + 1
    assert training.run("stop", run).returncode == 0
    resumed.finish()
