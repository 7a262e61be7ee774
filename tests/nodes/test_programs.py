"""Programs that know nothing of clusterctl, on nodes: the three of examples/, and trainers of public packages.

Each story: train, a rank is killed, restart from the newest checkpoint, status, metrics, collect. One is also stopped
and resumed. Steps that ran twice must have had the same loss. One story also compares all losses with those of an
uninterrupted run.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from training import RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PUBLIC = Path(__file__).with_name("public")


@dataclass(frozen=True)
class Program:
    """A program, what makes its data, and what its user types after ``clusterctl train``.

    Attributes:
        folder: its folder.
        prepare: a script in it; "": it needs no data.
        typed: the words.
        line: matches a line with a step and its loss, and has the groups ``step`` and ``loss``.
        shown: formats a step as in such a line.
        where: the option that selects the nodes.
        kill: the step after which a rank of the last node is killed; checkpoints are saved at every 20th step.
        stop: the step after which the run is stopped, to be resumed; None: it is not stopped.
        last: the last step.
        saved: the name of a checkpoint, with its number.
        number: the number of a step's checkpoint.
        newest: the name of the newest checkpoint at the end.
        fp32: ``collect --fp32`` joins the parts of its checkpoints.
        alone: another run of it, without an interruption, has the same losses.
    """

    folder: Path
    prepare: str
    typed: tuple[str, ...]
    line: str
    last: int
    saved: str
    newest: str
    fp32: bool = False
    alone: bool = False
    where: tuple[str, str] = ("--nodes", "2")
    kill: int = 24
    stop: int | None = None
    shown: Callable[[int], str] = str
    number: Callable[[int], int] = int

    def at(self, step):
        """Matches the line of a step."""
        return self.line.replace(re.search(r"\(\?P<step>.*?\)", self.line)[0], re.escape(self.shown(step)) + r"\b")


RUN_CLM = Program(
    folder=EXAMPLES / "run_clm",
    prepare="prepare.py",
    typed=(
        *("--", "deepspeed", "--num_gpus=1", "--module", "training.run_clm", "--model_name_or_path", "model"),
        *("--from_scratch", "--dataset_name", "data/wikitext", "--block_size", "32", "--max_steps", "80"),
        *("--save_steps", "20", "--logging_steps", "1", "--per_device_train_batch_size", "2"),
        *("--gradient_accumulation_steps", "8", "--use_cpu"),
        *("--deepspeed", "ds_config_cpu.json", "--output_dir", "./output"),
    ),
    line=r"'loss': '(?P<loss>[\d.]+)'.*'epoch': '(?P<step>[\d.]+)'",
    last=80,
    saved="checkpoint-{}",
    newest="checkpoint-80",
    fp32=True,
    shown=lambda step: f"{step / 23:.4g}",  # it prints the epoch, of 23 steps
)
VLM = Program(
    folder=EXAMPLES / "vlm",
    prepare="data/prepare.py",
    typed=("train_vlm.py", "--", "--config", "configs/vlm_tiny.yaml", "--stage", "pretrain"),
    line=r"Step \[(?P<step>\d+)/\d+\] Loss: (?P<loss>[\d.]+)",
    last=64,
    saved="checkpoint_step_{}.pt",
    newest="latest.pt",
)
GPT2 = Program(
    folder=EXAMPLES / "gpt2_deepspeed",
    prepare="data/shakespeare/prepare.py",
    typed=(
        *("train_deepspeed.py", "--", "--init_from", "scratch", "--deepspeed_config", "ds_config_cpu.json"),
        *("--block_size", "32", "--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--max_iters", "100"),
        *("--gradient_accumulation_steps", "2", "--eval_interval", "20", "--eval_iters", "2"),
        *("--learning_rate", "1e-3", "--warmup_iters", "5", "--lr_decay_iters", "100", "--always_save_checkpoint"),
    ),
    line=r"iter (?P<step>\d+): loss (?P<loss>[\d.]+)",
    last=99,
    saved="iter_{}",
    newest="final",
    fp32=True,
    stop=44,
)
# torchtune 0.6.1 trains on CPUs only with its recipes for one device: the others fail in ``get_memory_stats``.
TORCHTUNE = Program(
    folder=PUBLIC / "torchtune",
    prepare="prepare.py",
    where=("--limit", "node01"),
    typed=(
        "--resume-arg",
        "resume_from_checkpoint=True checkpointer.checkpoint_files=[{name}/model-00001-of-00001.safetensors]",
        *("full_finetune_single_device.py", "--", "--config", "tiny.yaml"),
    ),
    line=r"Step (?P<step>\d+) \| loss:(?P<loss>[\d.]+)",
    last=40,
    saved="epoch_{}",
    newest="epoch_1",
    number=lambda step: step // 20 - 1,
)
# litgpt 0.5.13 trains with several processes only on GPUs: it selects Lightning's FSDP strategy.
LITGPT = Program(
    folder=PUBLIC / "litgpt",
    prepare="prepare.py",
    where=("--limit", "node01"),
    typed=(
        *("--resume-arg", "--resume {checkpoint}/lit_model.pth", "--code", ".", "-m", "litgpt", "--"),
        *("finetune_full", "model", "--out_dir", "out", "--precision", "32-true", "--eval.interval", "1000"),
        *("--data", "JSON", "--data.json_path", "data.json", "--data.val_split_fraction", "0.1"),
        *("--data.num_workers", "0", "--train.epochs", "1000", "--train.max_steps", "44"),
        *("--train.save_interval", "20", "--train.log_interval", "8", "--train.lr_warmup_steps", "5"),
        *("--train.global_batch_size", "32", "--train.micro_batch_size", "4"),
    ),
    line=r"iter \d+ step (?P<step>\d+) \| loss train: (?P<loss>[\d.]+)",
    last=44,
    saved="step-{:06d}",
    newest="final",
)
ACCELERATE = Program(
    folder=PUBLIC / "accelerate",
    prepare="",
    typed=("--launcher", "accelerate", "train.py", "--", "--max_steps", "44"),
    line=r"step (?P<step>\d+) loss (?P<loss>[\d.]+)",
    last=44,
    saved="step_{}",
    newest="step_40",
    alone=True,
)


def prepared(nodes, lab_env, folder, source, prepare):
    """The same nodes for a user's folder with a program. Its data are git-ignored, as in the repositories of users."""
    user = nodes.own(folder, source)
    subprocess.run(["git", "init", "-q", folder], check=True)
    if prepare:
        subprocess.run([lab_env / "bin/python", prepare], check=True, cwd=folder, capture_output=True)
    return user


def losses(program, text):
    """By step as rank 0 printed it, the losses: one for each time that the step ran."""
    found = {}
    for match in re.finditer(program.line, text):
        found.setdefault(match["step"], []).append(match["loss"])
    return found


def stop_and_resume(user, run, attached, program):
    stopped = user.run("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    attached.finish()
    assert user.marked(run=run) == []
    resumed = user.run("resume", run)
    message = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, message
    saved = re.sub(r"\{.*?\}", "([0-9]+)", program.saved)
    start = re.search(rf"attempt \d+ of 2 from \S*{saved}$", message, re.MULTILINE)
    assert start, message
    assert int(start[1]) >= program.number(40), message  # a fast program saves again before the stop arrives


PROGRAMS = [RUN_CLM, VLM, GPT2, TORCHTUNE, LITGPT, ACCELERATE]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.folder.name)
def test_killed_restarted_collected(program_nodes, lab_env, tmp_path, program):
    user = prepared(program_nodes, lab_env, tmp_path / "work", program.folder, program.prepare)
    options = ("--restarts", "1", "--copies", "0")
    attached = user.start("train", *program.where, *options, *program.typed, until=program.at(2))
    run = user.last_run().name
    node = "node02" if program.where[0] == "--nodes" else program.where[1]
    rank = user.rank(node, run)
    attached.until(program.at(program.kill))
    user.kill(node, rank)
    attached.until(rf"attempt 2 of 2 from \S*{re.escape(program.saved.format(program.number(20)))}$")
    if program.stop:
        attached.until(program.at(program.stop))
        stop_and_resume(user, run, attached, program)
    else:
        assert attached.finish() == 0, attached.output
    found = losses(program, user.run("logs", run, "--rank", "0", "-n", "1000").stdout)
    assert list(found)[-1] == program.shown(program.last), found
    repeated = {step: values for step, values in found.items() if len(values) > 1}
    assert len(repeated) >= 3, found  # at least those from the checkpoint to the kill
    assert all(len(set(values)) == 1 for values in repeated.values()), repeated
    if program.alone:
        alone = user.run("train", *program.where, *program.typed)
        assert alone.returncode == 0, alone.stdout + alone.stderr
        text = user.run("logs", user.last_run().name, "--rank", "0", "-n", "1000").stdout
        assert losses(program, text) == {step: values[:1] for step, values in found.items()}

    state = json.loads(user.run("status", run, "--json").stdout)
    assert state["state"] == "finished"
    last = float(found[program.shown(program.last)][-1])
    assert state["loss"] == pytest.approx(last), state
    assert state["step"] == program.last, state
    metrics = user.run("metrics", run)
    assert f"now {last:.4g}" in metrics.stdout, metrics.stdout + metrics.stderr
    options = ("--fp32",) if program.fp32 else ()
    collected = user.run("collect", *options, run, "--to", tmp_path / "collected")
    assert collected.returncode == 0, collected.stderr
    names = {path.name for path in tmp_path.joinpath("collected").rglob("*")}
    assert program.newest in names, names
    assert not program.fp32 or names & {"pytorch_model.bin", "model.safetensors"}, names


def test_trl_as_its_package_installs_it(program_nodes, lab_env, tmp_path):
    """``trl.scripts.sft`` cannot resume, so it only trains."""
    user = prepared(program_nodes, lab_env, tmp_path / "work", EXAMPLES / "run_clm", "prepare.py")
    model = (
        "from transformers import AutoConfig as C, AutoModelForCausalLM as M; M.from_config(C.from_pretrained('model'))"
    )
    save = f"{model}.save_pretrained('model')"
    subprocess.run([lab_env / "bin/python", "-c", save], check=True, cwd=user.folder, capture_output=True)
    lines = user.folder.joinpath("data/wikitext/train.txt").read_text().splitlines()
    user.folder.joinpath("texts").mkdir()
    texts = "".join(json.dumps({"text": line}) + "\n" for line in lines[:100])
    user.folder.joinpath("texts/train.jsonl").write_text(texts)
    trained = user.run(
        *("train", "--nodes", "2", "--code", ".", "-m", "trl.scripts.sft", "--", "--model_name_or_path", "model"),
        *("--dataset_name", "texts", "--max_steps", "6", "--save_steps", "3", "--logging_steps", "1", "--use_cpu"),
        *("--bf16", "False", "--max_length", "32", "--gradient_checkpointing", "False", "--output_dir", "out"),
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "Training completed" in trained.stdout + trained.stderr
    assert finishes_with(user, tmp_path, newest="checkpoint-6")["step"] == 6


def test_accelerates_own_script(program_nodes, tmp_path):
    """``test_script.py`` compares a training by two processes with one of one process.

    Both are on one node: the script writes and reads a file of the working directory. It saves nothing. accelerate's
    ``test_checkpointing.py``, which saves, loads ``glue`` and its metric from the hub.
    """
    user = program_nodes.own(tmp_path / "work", PUBLIC / "lightning")
    words = ("--limit", "node01", "--gpus-per-node", "2", "--launcher", "accelerate")
    trained = user.run("train", *words, "-m", "accelerate.test_utils.scripts.test_script")
    message = trained.stdout + trained.stderr
    assert trained.returncode == 0, message
    assert "Training yielded the same results on one CPU or distributed setup with batch split" in message, message


def test_lightning_resumes(program_nodes, tmp_path):
    user = program_nodes.own(tmp_path / "work", PUBLIC / "lightning")
    words = ("train", "--nodes", "2", "fit.py", "--", "--num_nodes", "2", "--max_epochs", "60")
    attached = user.start(*words, until="Total params")
    run = user.last_run().name
    saved = f"test -e {RUNS}/{run}/job/lightning_out/checkpoints/epoch=4-*.ckpt"
    wait_until(lambda: user.box.enter("node01", ["sh", "-c", saved]).returncode == 0, "a checkpoint", 120)
    user.kill("node02", user.rank("node02", run))
    assert attached.finish() == 6, attached.output
    resumed = user.run("resume", run)
    message = resumed.stdout + resumed.stderr
    assert resumed.returncode == 0, message
    assert "Restored all states from the checkpoint" in message, message
    state = finishes_with(user, tmp_path, newest="epoch=59-step=600.ckpt")
    assert state["step"] == 599, state  # Lightning logs the first step as 0


def finishes_with(user, tmp_path, *, newest):
    run = user.last_run().name
    state = json.loads(user.run("status", run, "--json").stdout)
    assert state["state"] == "finished"
    assert state["loss"] is not None, state
    shown = user.run("status").stdout
    assert f"{state['loss']:.4g}" in shown, shown
    metrics = user.run("metrics", run)
    assert f"now {state['loss']:.4g}" in metrics.stdout, metrics.stdout + metrics.stderr
    collected = user.run("collect", run, "--to", tmp_path / "collected")
    assert collected.returncode == 0, collected.stderr
    assert any(path.name.endswith(newest) for path in tmp_path.joinpath("collected").rglob("*"))
    return state
