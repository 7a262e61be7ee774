"""A stop that keeps the work, and a disk that is full when a checkpoint is saved."""

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


def test_a_disk_that_is_full_during_a_checkpoint_is_named_and_resume_goes_on(training):
    output = "/home/trainer/small/out"
    for node in training.nodes:
        training.on(node, "mkdir", "-p", output)
        training.on(node, "chown", "-R", "trainer:trainer", "/home/trainer/small")
    training.on("node01", "mount", "-t", "tmpfs", "-o", "size=6m,uid=1000,gid=1000", "tmpfs", output)
    try:
        failed = training.start(
            *("train", "--nodes", "2", "--output", output, "--resume-arg", "--resume={checkpoint}", "tiny.py", "--"),
            *("--steps", "40", "--pause", "0", "--output", output, "--save-every", "5", "--ballast", "2500000"),
            until=r"step 1 ",
        )
        assert failed.finish() == 6, failed.output
        run = training.last_run().name
        assert training.marked(run=run) == []
        diagnosed = training.run("diagnose", run)
        assert "node01 rank 0 failed first: no room left on the disk" in diagnosed.stdout, diagnosed.stdout
        training.on("node01", "mount", "-o", "remount,size=64m", output)
        resumed = training.run("resume", run)
        assert resumed.returncode == 0, resumed.stderr
        went_on = re.findall(r"rank 0 goes on from step (\d+)", resumed.stdout + resumed.stderr)
        assert went_on == ["10"]  # two of them had room
    finally:
        training.on("node01", "umount", "-l", output)
        for node in training.nodes:
            training.on(node, "rm", "-rf", "/home/trainer/small")
