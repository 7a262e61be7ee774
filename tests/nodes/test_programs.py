"""Programs that know nothing of clusterctl, on two nodes: the three of examples/, and trainers of public packages.

Each story: train, a rank is killed, restart from the newest checkpoint, stop, resume, status, metrics, collect. Steps
that ran twice must have had the same loss, so the losses are those of an uninterrupted run.
"""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from training import wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass(frozen=True)
class Program:
    """A program's folder in examples/, what makes its data, and what its user types after ``clusterctl train``.

    Attributes:
        step: matches a line with a step and its loss, and has the groups ``step`` and ``loss``.
        kill: the step after which a rank is killed; the checkpoint of ``saved`` is complete then.
        stop: the step after which the run is stopped.
        last: the last step.
        resumed: matches the line in which the program says from where it continues.
        newest: the newest checkpoint at the end, below the collected folder.
        fp32: ``collect --fp32`` joins the parts of its checkpoints.
    """

    folder: str
    prepare: str
    typed: tuple
    step: str
    kill: int
    stop: int
    last: int
    resumed: str
    newest: str
    fp32: bool = False


RUN_CLM = Program(
    folder="run_clm",
    prepare="prepare.py",
    typed=(
        *("--", "deepspeed", "--num_gpus=1", "--module", "training.run_clm", "--model_name_or_path", "model"),
        *("--from_scratch", "--dataset_name", "data/wikitext", "--block_size", "32", "--max_steps", "60"),
        *("--save_steps", "20", "--logging_steps", "1", "--per_device_train_batch_size", "2", "--use_cpu"),
        *("--deepspeed", "ds_config_cpu.json", "--output_dir", "./output", "--disable_tqdm", "True"),
    ),
    step=r"'loss': '?(?P<loss>[\d.]+)",
    kill=24,
    stop=44,
    last=60,
    resumed=r"resuming training at \S*checkpoint-(?P<step>\d+)",
    newest="checkpoint-60",
    fp32=True,
)
VLM = Program(
    folder="vlm",
    prepare="data/prepare.py",
    typed=("train_vlm.py", "--", "--config", "configs/vlm_tiny.yaml", "--stage", "pretrain"),
    step=r"Step \[(?P<step>\d+)/\d+\] Loss: (?P<loss>[\d.]+)",
    kill=24,
    stop=44,
    last=64,
    resumed=r"Resumed from \S+: epoch \d+, step (?P<step>\d+)",
    newest="latest.pt",
)
GPT2 = Program(
    folder="gpt2_deepspeed",
    prepare="data/shakespeare/prepare.py",
    typed=(
        *("train_deepspeed.py", "--", "--init_from", "scratch", "--deepspeed_config", "ds_config_cpu.json"),
        *("--block_size", "32", "--n_layer", "2", "--n_head", "2", "--n_embd", "32", "--max_iters", "60"),
        *("--gradient_accumulation_steps", "2", "--eval_interval", "20", "--eval_iters", "2"),
        *("--learning_rate", "1e-3", "--warmup_iters", "5", "--lr_decay_iters", "60", "--always_save_checkpoint"),
    ),
    step=r"iter (?P<step>\d+): loss (?P<loss>[\d.]+)",
    kill=24,
    stop=44,
    last=59,
    resumed=r"Resumed from iteration (?P<step>\d+)",
    newest="final",
    fp32=True,
)


def losses(program, text):
    """By step, the losses that rank 0 printed, one for each time that the step ran; and the steps it resumed from."""
    found, starts, step = {}, [], 0
    for line in text.splitlines():
        if resumed := re.search(program.resumed, line):
            step = int(resumed["step"])
            starts.append(step)
        elif match := re.search(program.step, line):
            step = int(match["step"]) if "step" in match.groupdict() else step + 1
            found.setdefault(step, []).append(match["loss"])
    return found, starts


def _at(program, number):
    """Matches the line of a step."""
    return program.step.replace(r"(?P<step>\d+)", rf"{number}\b") if "<step>" in program.step else program.step


@pytest.mark.parametrize("program", [RUN_CLM, VLM, GPT2], ids=lambda program: program.folder)
def test_killed_restarted_stopped_resumed_collected(training_nodes, lab_env, tmp_path, program):
    user = training_nodes.own(tmp_path / "work", EXAMPLES / program.folder)
    subprocess.run([lab_env / "bin/python", program.prepare], check=True, cwd=user.folder, capture_output=True)

    # The data that this made are git-ignored, as in the repositories of users.
    subprocess.run(["git", "init", "-q", user.folder], check=True)

    # DeepSpeed and torchrun wait for each other on both nodes, so a dead rank of one ends both.
    attached = user.start("train", "--nodes", "2", "--restarts", "1", *program.typed, until=_at(program, 1))
    run = user.last_run().name
    rank = user.rank("node02", run)
    attached.until(_at(program, program.kill))
    user.kill("node02", rank)
    attached.until(program.resumed)
    attached.until(_at(program, program.stop))
    stopped = user.run("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    attached.finish()
    assert user.marked(run=run) == []

    resumed = user.run("resume", run)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    found, starts = losses(program, user.run("logs", run, "--rank", "0", "-n", "1000").stdout)
    assert starts == [20, 40]
    assert sorted(found)[-1] == program.last
    repeated = {step: values for step, values in found.items() if len(values) > 1}
    assert len(repeated) >= 2, found
    assert all(len(set(values)) == 1 for values in repeated.values()), repeated

    state = json.loads(user.run("status", run, "--json").stdout)
    assert state
    print(state)
    print(user.run("metrics", run).stdout)
    options = ("--fp32",) if program.fp32 else ()
    collected = user.run("collect", *options, run, "--to", tmp_path / "collected")
    assert collected.returncode == 0, collected.stderr
    names = [path for path in tmp_path.joinpath("collected").rglob("*")]
    assert any(path.name == program.newest for path in names), names
    print("\n".join(map(str, names)))
