"""The GPT trainer on two nodes: it is sent with the run, is killed, and resumes with the same losses."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from training import RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--data", "shards", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "32"),
    *("--batch-size", "4", "--eval-interval", "10", "--eval-iters", "2", "--save-interval", "4", "--trackers", "none"),
)


def python(lab_env, folder, *argv):
    """A program of the trainer's on this machine, with the packed environment's Python."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [lab_env / "bin/python", *argv], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def training(training_nodes, lab_env, tmp_path):
    """A new folder with shards of tokens."""
    own = training_nodes.own(tmp_path / "job")
    (own.folder / "text.txt").write_text((ROOT / "LICENSE").read_text() * 3)
    python(lab_env, own.folder, "-m", "trainer.lm.prepare", "text.txt", "--out", "shards")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


def losses(training, run):
    """By step, from the trainer's own log on rank 0's node, as far as it is written."""
    shown = training.box.enter("node01", ["cat", f"{RUNS}/{run}/job/out/trainer_log.jsonl"]).stdout
    lines = [json.loads(line) for line in shown.splitlines(keepends=True) if line.endswith("\n")]
    return {line["current_steps"]: line["loss"] for line in lines if line.get("loss") is not None}


def test_killed_rank_loses_no_result_and_the_model_is_exported(training, lab_env, tmp_path):
    whole = training.run("train", "--nodes", "2", "-m", "trainer.lm", "--", *SMALL, "--max-iters", "24")
    assert whole.returncode == 0, whole.stderr + whole.stdout
    expected = losses(training, training.last_run().name)
    assert sorted(expected) == list(range(1, 25))

    words = ("train", "--nodes", "2", "--restarts", "1", "-m", "trainer.lm", "--", *SMALL, "--max-iters", "24")
    broken = training.start(*words, until=r"saved out/iter_4\b")
    run = training.last_run().name
    wait_until(lambda: len(losses(training, run)) >= 5, "five steps", 60)
    training.kill("node02", training.rank("node02", run), signal.SIGKILL)
    assert broken.finish(240) == 0, broken.output
    found = losses(training, run)
    assert sorted(found) == list(range(1, 25))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step

    collected = training.run("collect", run, "--to", tmp_path / "here")
    assert collected.returncode == 0, collected.stderr
    (newest,) = {path.parent for path in (tmp_path / "here").rglob("complete.json")}
    assert newest.name == "iter_24"
    python(lab_env, training.folder, "-m", "trainer.lm.export", newest, tmp_path / "exported")
    loads = "import sys, transformers as t; print(type(t.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
    assert "GPT2LMHeadModel" in python(lab_env, training.folder, "-c", loads, tmp_path / "exported")


def test_a_stop_that_saves_keeps_the_current_step(training):
    going = training.start(
        *("train", "--nodes", "2", "-m", "trainer.lm", "--", *SMALL, "--max-iters", "100000", "--save-interval", "0"),
        *("--eval-interval", "0"),
        until=r"iter 3: ",
    )
    run = training.last_run().name
    stopped = training.run("stop", run, "--save")
    assert stopped.returncode == 0, stopped.stderr
    going.finish()
    kept = training.on("node01", "sh", "-c", f"ls {RUNS}/{run}/job/out")
    last = max(losses(training, run))
    assert f"iter_{last}" in kept.split(), kept
    assert training.marked(run=run) == []
