"""Full fine-tuning on short instructions on one GPU: LLaMA-Factory beside trainer.lm, a line of JSON for each way.

    scripts/benchmarks/finetune_gpu.py [WAY...] [--samples 6000] [--steps 24]

The model is random: 3.09 B parameters in the shape of Qwen2.5, 36 layers. The samples have 400 tokens on average. Ways:
``defaults`` and ``neat`` (LLaMA-Factory: 1 x 8, and Liger with neat packing 2 x 8192), ``ours`` (2 x 8192, bf16 with
fp32 master weights), ``ours-fp8``, and ``ours-ckpt`` (4 x 8192 with selective checkpointing). Useful tokens/s do not
count padding. ``losses`` are means over as many samples each, so ways can be compared whatever their batch.
"""

# ruff: noqa: PLC0415 - a way imports only what it needs
from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LLAMA_FACTORY = {
    "defaults": (1, 8, ["cutoff_len: 2048"]),
    "neat": (
        2,
        1,
        [
            "cutoff_len: 8192",
            "enable_liger_kernel: true",
            "packing: true",
            "neat_packing: true",
            "disable_gradient_checkpointing: true",
        ],
    ),
}
OURS = {
    "ours": (2, []),
    "ours-fp8": (2, ["--fp8", "auto"]),
    "ours-ckpt": (4, ["--checkpointing", "selective"]),
}
YAML = """\
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: d
dataset_dir: data
template: qwen
output_dir: out_{way}
overwrite_output_dir: true
overwrite_cache: true
logging_steps: 1
save_strategy: "no"
per_device_train_batch_size: {batch}
gradient_accumulation_steps: {accumulation}
max_steps: {steps}
learning_rate: 1.0e-5
lr_scheduler_type: constant
bf16: true
report_to: none
preprocessing_num_workers: 8
dataloader_num_workers: 4
"""
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WARM = 4  # steps that compile, allocate and fill caches


def make(folder: Path, count: int, small: bool) -> None:
    """Make the model and the data in a folder, as ``model`` and ``data``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    drawn = random.Random(0)
    words = [f"w{number}" for number in range(3000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join(drawn.choices(words, k=50)) for _ in range(2000)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "model")
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=4608 if small else 151936,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    with torch.device("cpu" if small else "cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")
    rows = []
    for _ in range(count):
        asked, answered = int(drawn.lognormvariate(3.5, 0.8)), int(drawn.lognormvariate(4.6, 0.9))
        question = " ".join(drawn.choices(words, k=min(400, asked)))
        rows.append(
            {"instruction": question, "input": "", "output": " ".join(drawn.choices(words, k=min(1200, answered)))}
        )
    (folder / "data").mkdir()
    (folder / "data/d.json").write_text(json.dumps(rows))
    (folder / "data/dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.json"}}))
    total = sum(len(each.ids) for each in tokenizer.encode_batch([row["instruction"] + row["output"] for row in rows]))
    (folder / "tokens").write_text(str(total + 20 * count))


def halves(losses: list[float], each: float, samples: int) -> list[float]:
    """Return the mean loss of every ``samples`` samples, with ``each`` samples in a step."""
    steps = max(1, round(samples / each))
    whole = range(0, len(losses) - steps + 1, steps)
    return [round(statistics.mean(losses[start : start + steps]), 4) for start in whole]


def llama_factory(way: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run one of LLaMA-Factory's settings."""
    batch, accumulation, more = LLAMA_FACTORY[way]
    total = int((folder / "tokens").read_text())
    per_sample = total / given.samples
    step_samples = batch * accumulation * (8192 / per_sample if way == "neat" else 1)
    steps = given.steps if way == "neat" else round(given.steps * 2 * 8192 / per_sample / step_samples)
    steps = min(steps, given.most)
    text = YAML.format(way=way, batch=batch, accumulation=accumulation, steps=steps)
    (folder / f"{way}.yaml").write_text(text + "\n".join(more) + "\n")
    environment = {**os.environ, "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "llamafactory.cli", "train", f"{way}.yaml"]
    problem = launch(argv, folder, folder / f"{way}.log", given.limit, environment)
    log = folder / f"out_{way}/trainer_log.jsonl"
    if not log.is_file():
        return {"way": way, "failed": problem}
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    if len(rows) <= WARM:
        return {"way": way, "failed": problem or "too few steps"}
    text = (folder / f"{way}.log").read_text(errors="replace")
    examples = int(re.search(r"Num examples = ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
    useful = total / examples * batch * accumulation
    times = [seconds(row["elapsed_time"]) for row in rows]
    speed = useful * (len(rows) - WARM) / max(1, times[-1] - times[WARM - 1])
    losses = halves([row["loss"] for row in rows], useful / per_sample, given.mean)
    return {"way": way, "useful_tokens_s": round(speed), "steps": len(rows), "losses": losses}


def seconds(clock: str) -> int:
    """``0:01:05`` in seconds."""
    hours, minutes, rest = clock.split(":")
    return int(hours) * 3600 + int(minutes) * 60 + int(rest)


def ours(way: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run one of our settings."""
    batch, more = OURS[way]
    total = int((folder / "tokens").read_text())
    block = given.block
    argv = [sys.executable, "-m", "trainer.lm", "--init", "model", "--data", "data/d.json", "--out", f"out_{way}"]
    argv += ["--block-size", str(block), "--batch-size", str(batch), "--max-iters", str(given.steps), *more]
    argv += ["--learning-rate", "1e-5", "--schedule", "constant", "--weight-decay", "0", "--beta2", "0.999"]
    argv += ["--eval-interval", "0", "--save", "false", "--trackers", "none"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    problem = launch(argv, folder, folder / f"{way}.log", given.limit, environment)
    log = folder / f"out_{way}/trainer_log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    rows = [row for row in rows if "loss" in row]
    if len(rows) <= WARM:
        return {"way": way, "failed": problem or "too few steps"}
    kept = 1 - rows[-1].get("padding", 0.0)
    ms = statistics.median(row["ms"] for row in rows[WARM:])
    losses = halves([row["loss"] for row in rows], batch * block * kept / (total / given.samples), given.mean)
    result = {"way": way, "useful_tokens_s": round(batch * block * kept / ms * 1e3), "steps": len(rows)}
    result.update(padding=rows[-1].get("padding", 0.0), ms=round(ms, 1), mfu=rows[-1].get("mfu"), losses=losses)
    return {**result, "gb": round((rows[-1].get("memory") or 0) / 1e9, 1)}


def launch(argv: list[str], folder: Path, log: Path, limit: float, environment: dict[str, str]) -> str:
    """Run a program with its output in ``log``. Return why it failed, or nothing."""
    with log.open("w") as file:
        try:
            code = subprocess.run(
                argv, cwd=folder, stdout=file, stderr=subprocess.STDOUT, timeout=limit, env=environment, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"more than {limit:g} s"
    lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
    return (lines or ["no message"])[-1][:300] if code else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", choices=[*LLAMA_FACTORY, *OURS], default=[], metavar="WAY")
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=24, help="of 2 x 8192 tokens")
    parser.add_argument("--most", type=int, default=60, help="steps of LLaMA-Factory's defaults at most")
    parser.add_argument("--mean", type=int, default=160, help="samples of a mean loss")
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each way")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/finetune"))
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this program on a CPU")
    given = parser.parse_args()
    if not (given.folder / "tokens").is_file():
        given.folder.mkdir(parents=True, exist_ok=True)
        make(given.folder, given.samples, given.small)
    for way in given.ways or [*LLAMA_FACTORY, *OURS]:
        run = llama_factory if way in LLAMA_FACTORY else ours
        sys.stdout.write(json.dumps(run(way, given.folder, given)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
