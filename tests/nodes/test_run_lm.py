"""The trainer of language models on two nodes: it is sent with the run, is killed, and resumes with the same losses."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from training import RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--data", "shards", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "32"),
    *("--global-batch", "8", "--batch-size", "4", "--eval-interval", "10", "--eval-iters", "2", "--save-interval", "4", "--trackers", "none"),
)
TUNED = (
    *("--init", "base", "--data", "chats.jsonl", "--block-size", "64", "--global-batch", "4", "--batch-size", "2"),
    *("--val", "0.1", "--epochs", "8", "--learning-rate", "3e-3", "--eval-interval", "0", "--save-interval", "8"),
    *("--trackers", "none"),
)
SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "vocab_size": 300,
}  # fmt: skip
TEMPLATE = "{% for each in messages %}{{ '<' + each['role'] + '>' + each['content'] + '\\n' }}{% endfor %}"
LOADS = "import sys, transformers as t; print(type(t.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"
NEW_MODEL = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = transformers.AutoConfig.for_model(**json.loads(sys.argv[1]))
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base", max_shard_size="40KB")
"""


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


@pytest.fixture
def tuning(training_nodes, lab_env, tmp_path):
    """A new folder with a model in several files, and conversations."""
    own = training_nodes.own(tmp_path / "job")
    (own.folder / "text.txt").write_text((ROOT / "LICENSE").read_text())
    words = ("--tokens", "bpe", "--vocab-size", str(SIZES["vocab_size"]))
    python(lab_env, own.folder, "-m", "trainer.lm.prepare", "text.txt", "--out", "words", *words)
    python(lab_env, own.folder, "-c", NEW_MODEL, json.dumps(SIZES))
    shutil.move(own.folder / "words/tokenizer.json", own.folder / "base")
    (own.folder / "base/chat_template.jinja").write_text(TEMPLATE)
    with (own.folder / "chats.jsonl").open("w") as file:
        for number in range(60):
            question = {"role": "user", "content": f"twice {number}"}
            file.write(json.dumps({"messages": [question, {"role": "assistant", "content": str(2 * number)}]}) + "\n")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


def losses(training, run):
    """By step, from the trainer's own log on rank 0's node, as far as it is written."""
    return logged(training.box.enter("node01", ["cat", f"{RUNS}/{run}/job/out/trainer_log.jsonl"]).stdout)


def alone(lab_env, training, tmp_path, module, *words):
    """The losses of one process on this machine, by step."""
    python(lab_env, training.folder, "-m", module, *words, "--out", tmp_path / "alone", "--save", "false")
    return logged((tmp_path / "alone/trainer_log.jsonl").read_text())


def logged(text):
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line["current_steps"]: line["loss"] for line in lines if line.get("loss") is not None}


def copied(training, run):
    """The name of the newest checkpoint that other nodes have copies of; None without one."""
    shown = training.on("node01", "cat", f"{RUNS}/{run}/logs/node0/state.json")
    return (json.loads(shown).get("copied") or {}).get("checkpoint")


def test_killed_rank_and_lost_disk_lose_no_result_and_the_model_is_exported(training, lab_env, tmp_path):
    expected = alone(lab_env, training, tmp_path, "trainer.lm", *SMALL, "--max-iters", "24")
    assert sorted(expected) == list(range(1, 25))

    words = ("train", "--nodes", "2", "--restarts", "1", "--on-hang", "warn", "-m", "trainer.lm", "--", *SMALL)
    words = (*words, "--max-iters", "24")
    broken = training.start(*words, until=r"saved out/iter_4\b")
    run = training.last_run().name
    wait_until(lambda: len(losses(training, run)) >= 5, "five steps", 60)
    rank = training.rank("node02", run)
    training.kill("node02", rank, signal.SIGSTOP)  # saves nothing more, so one certain checkpoint is copied
    wait_until(lambda: copied(training, run), "a copied checkpoint", 60)
    kept = copied(training, run)
    training.on("node02", "rm", "-r", f"{RUNS}/{run}/job/out")
    training.kill("node02", rank, signal.SIGKILL)
    assert broken.finish(240) == 0, broken.output
    lines = training.on("node01", "cat", f"{RUNS}/{run}/logs/node0/events.jsonl").splitlines()
    attempts = [event for event in map(json.loads, lines) if event["event"] == "attempt"]
    assert [event["checkpoint"] for event in attempts] == [None, kept]
    found = losses(training, run)
    assert sorted(found) == list(range(1, 25))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), step

    collected = training.run("collect", run, "--to", tmp_path / "here")
    assert collected.returncode == 0, collected.stderr
    (newest,) = {path.parent for path in (tmp_path / "here").rglob("complete.json")}
    assert newest.name == "iter_24"
    python(lab_env, training.folder, "-m", "trainer.lm.export", newest, tmp_path / "exported")
    assert "GPT2LMHeadModel" in python(lab_env, training.folder, "-c", LOADS, tmp_path / "exported")


def test_fine_tuning_on_two_nodes_has_the_losses_of_one_process(tuning, lab_env, tmp_path):
    """The options name a model and conversations of this machine; a rank is killed on the way."""
    expected = alone(lab_env, tuning, tmp_path, "trainer.lm", *TUNED)
    assert len(expected) > 24, expected

    words = ("train", "--nodes", "2", "--restarts", "1", "-m", "trainer.lm", "--", *TUNED)
    broken = tuning.start(*words, until=r"saved out/iter_8\b")
    run = tuning.last_run().name
    tuning.kill("node02", tuning.rank("node02", run), signal.SIGKILL)
    assert broken.finish(240) == 0, broken.output
    assert "resumed from" in broken.output
    assert losses(tuning, run) == pytest.approx(expected, rel=1e-5)

    collected = tuning.run("collect", run, "--to", tmp_path / "here")
    assert collected.returncode == 0, collected.stderr
    (final,) = {path.parent for path in (tmp_path / "here").rglob("final")}
    python(lab_env, tuning.folder, "-m", "trainer.lm.export", final / "final", tmp_path / "tuned")
    assert "LlamaForCausalLM" in python(lab_env, tuning.folder, "-c", LOADS, tmp_path / "tuned")
    assert (tmp_path / "tuned/chat_template.jinja").read_text() == TEMPLATE


def test_a_vision_language_model_trains_on_two_nodes_as_in_one_process(training_nodes, lab_env, tmp_path):
    """The data's folder has the images, and some batches have none."""
    own = training_nodes.own(tmp_path / "job")
    python(lab_env, own.folder, ROOT / "tests/lm/vlm_made.py", own.folder)
    (own.folder / "chats").mkdir()
    for name in ("mixed.json", "pictures"):
        shutil.move(own.folder / name, own.folder / "chats")
    words = ("--init", "qwen", "--data", "chats", "--block-size", "128", "--batch-size", "1", "--global-batch", "2")
    words += ("--max-iters", "4", "--eval-interval", "0", "--trackers", "none", "--scale-lr", "none")
    expected = alone(lab_env, own, tmp_path, "trainer.vlm", *words)
    assert len(expected) == 4, expected
    done = own.run("train", "--nodes", "2", "-m", "trainer.vlm", "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(own, own.last_run().name) == pytest.approx(expected, rel=1e-5)


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
