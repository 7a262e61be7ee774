"""Trains GPT-2 XL for a few steps in several ways on random tokens, and prints the speed of each as a line of JSON.

See lm_gpu.sh. Times are medians of the steps after the first two, which compile and fill caches; of a guide's settings
two are left, of 32 passes each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from trainer.lm.families import PUBLISHED  # noqa: E402 - the checkout is not installed here
from trainer.lm.log import peak  # noqa: E402
from trainer.lm.model import flops_per_token  # noqa: E402

BLOCK = 1024
STEPS = 7
GUIDE_STEPS = 4  # of 32 passes each
WARM = 2
MODEL = os.environ.get("MODEL", "gpt2-xl")
SHAPE = PUBLISHED[MODEL]
VOCABULARY = SHAPE.vocab_size
LARGE = 4e9  # parameters; larger models recompute activations, and save once before the end
GPUS = int(os.environ.get("GPUS", torch.cuda.device_count()))
NANOGPT = Path(os.environ.get("NANOGPT", "/tmp/nanoGPT"))


def cases(batch: int) -> dict[str, list[str]]:
    """What is compared, the most wanted first."""
    both = ["--batch-size", str(batch), "--accumulation", "2"]
    is_large = SHAPE.parameters > LARGE
    both += ["--checkpointing", "full"] if is_large else []

    def guide(engine: str, samples: int, *more: str) -> list[str]:
        passes = ["--batch-size", str(samples), "--accumulation", str(32 // samples)]
        return ["--engine", engine, "--dtype", "float16", *passes, "--max-iters", str(GUIDE_STEPS), *more]

    # A large model's steps last as long as its save: the end of a training waits for one that is being written.
    interval, steps = ("130", "260") if is_large else ("4", "13")
    saves = ["--save", "true", "--save-interval", interval, "--max-iters", steps, "--keep", "1"]
    return {
        "ours": both,
        "guide": guide("zero2", 1, "--compile", "off"),
        "nanogpt": [str(max(1, batch // 2))],
        "zero2": ["--engine", "zero2", *both],
        "guide-compiled": guide("zero2", 1, "--compile", "whole"),
        "guide-coalesced": guide("zero2", 1, "--compile", "off", "--coalesce"),
        "guide-both": guide("zero2", 1, "--compile", "whole", "--coalesce"),
        "guide-2": guide("zero2", 2, "--compile", "off"),
        "guide-zero3": guide("zero3", 1, "--compile", "off"),
        "guide-ddp": guide("zero0", 1, "--compile", "off"),
        "ours-blocks": [*both, "--compile", "blocks"],
        "fp8": [*both, "--compile", "blocks", "--fp8", "auto"],
        "fsdp": ["--engine", "fsdp", *both],
        "fsdp-coalesced": ["--engine", "fsdp", *both, "--coalesce"],
        "fsdp-fp8": ["--engine", "fsdp", *both, "--fp8", "auto"],
        "fsdp-adamw8bit": ["--engine", "fsdp", *both, "--optimizer", "adamw8bit"],
        "muon": [*both, "--optimizer", "muon"],
        "fsdp-offload": ["--engine", "fsdp", *both, "--offload", "all"],
        "saves": [*both, *saves],
        "saves-fsdp": ["--engine", "fsdp", *both, *saves],
        "saves-off": [*both, *saves, "--save-async", "off"],
    }


def launch(argv: list[str], folder: Path, log: Path, seconds: float) -> str:
    """Run all ranks; why it failed, or nothing. Whatever happens, nothing of it is left."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(GPUS)]
    environment = dict(os.environ, PYTHONPATH=str(HERE), OMP_NUM_THREADS="4")
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*torchrun, *argv], cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
            process.wait()
            return f"not done in {seconds:.0f} s"
    return "" if status == 0 else f"exit code {status}: {reason(log)}"


def reason(log: Path) -> str:
    """The most informative line of a log."""
    lines = log.read_text(errors="replace").splitlines()
    telling = [line for line in lines if re.search(r"^error: |Error: |error:", line)]
    return (telling or lines or ["no output"])[0][:300]


def ours(name: str, argv: list[str], work: Path, seconds: float) -> dict[str, object]:
    out = work / name
    fixed = ["--data", str(work / "data"), "--out", str(out), "--model", MODEL, "--block-size", str(BLOCK)]
    fixed += ["--max-iters", str(STEPS), "--eval-interval", "0", "--save", "false", "--trackers", "none"]
    why = launch(["-m", "trainer.lm", *fixed, *argv], HERE, work / f"{name}.log", seconds)
    path = out / "trainer_log.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [each for each in records if "ms" in each][WARM:]
    if not steps:
        return {"failed": why or "too few steps"}
    accumulation = int(argv[argv.index("--accumulation") + 1])
    parts = [key for key in steps[-1] if key.endswith("_ms")]
    result: dict[str, object] = {"steps": len(steps)}
    result["ms_micro_step"] = round(statistics.median(each["ms"] for each in steps) / accumulation, 1)
    result["tokens_per_second"] = round(statistics.median(each["tokens_per_second"] for each in steps))
    result["mfu"] = round(statistics.median(each["mfu"] or 0 for each in steps), 4)
    result["gb_peak"] = round(max(each["memory"] or 0 for each in steps) / 1e9, 1)
    result["parts_ms_a_step"] = {key[:-3]: round(statistics.median(each[key] for each in steps), 1) for key in parts}
    saves = re.findall(r"took ([\d.]+)s, the training paused for ([\d.]+)s", (out / "train.log").read_text())
    if saves:
        result["saves_took_paused_s"] = [[float(took), float(paused)] for took, paused in saves]
        result["slower_after_save_s"] = slower(records, (out / "train.log").read_text())
    if why:
        result["failed"] = why
    return result


def slower(records: list[dict[str, float]], log: str) -> list[float]:
    """By how many seconds the five steps after the start of each save were slower than the median step, together.

    The GPU copies the weights during the next step, and waits for the copies before it updates them.
    """
    times = {record["current_steps"]: record["ms"] for record in records if "ms" in record}
    median = statistics.median(times.values())
    saved = [int(step) for step in re.findall(r"^step (\d+): saved", log, re.MULTILINE)]
    after = [[times[step + more] for more in range(1, 6) if step + more in times] for step in saved]
    return [round(sum(max(0.0, each - median) for each in steps) / 1e3, 3) for steps in after]


def nanogpt(batch: str, work: Path, seconds: float) -> dict[str, object]:
    if not (NANOGPT / "train.py").is_file():
        return {"skipped": f"{NANOGPT}/train.py is not there"}
    copy = work / "nanoGPT"
    shutil.copytree(NANOGPT, copy, ignore=shutil.ignore_patterns(".git", "data"))
    (copy / "data/random").mkdir(parents=True)
    for split in ("train", "val"):
        (copy / f"data/random/{split}.bin").symlink_to(work / f"data/{split}.bin")
    shape = PUBLISHED[MODEL]
    layers, heads, width = shape.n_layer, shape.n_head, shape.n_embd
    settings = {"dataset": "random", "n_layer": layers, "n_head": heads, "n_embd": width, "block_size": BLOCK}
    settings.update(
        batch_size=batch, gradient_accumulation_steps=2 * GPUS, max_iters=STEPS, eval_iters=1, log_interval=1
    )
    settings.update(
        eval_interval=10**6, warmup_iters=1, lr_decay_iters=STEPS, out_dir="out", dtype="bfloat16", bias=True
    )
    argv = [f"--{key}={value}" for key, value in settings.items()]
    log = work / "nanogpt.log"
    why = launch(["train.py", *argv], copy, log, seconds)
    found = [float(ms) for ms in re.findall(r"^iter \d+: loss \S+ time ([\d.]+)ms", log.read_text(), re.MULTILINE)]
    if len(found) <= WARM:
        return {"failed": why or "too few steps"}
    ms = statistics.median(found[WARM:])
    speed = int(batch) * 2 * GPUS * BLOCK / ms * 1e3
    flops = flops_per_token(replace(shape, vocab_size=VOCABULARY), BLOCK)
    share = speed * flops / GPUS / (peak(torch.device("cuda", 0)) or float("inf"))
    result = {"steps": len(found) - WARM, "batch": int(batch), "ms_micro_step": round(ms / 2, 1)}
    return dict(result, tokens_per_second=round(speed), mfu=round(share, 4), gb_peak=None)


def main() -> None:
    if not GPUS:
        sys.exit("lm_gpu: torch sees no GPU here")
    until = time.monotonic() + float(os.environ.get("SECONDS_IN_ALL", "200"))
    memory = torch.cuda.get_device_properties(0).total_memory
    batch = int(os.environ.get("BATCH", "32" if memory > 120e9 else "16" if memory > 75e9 else "4"))
    known = cases(batch)
    wanted = sys.argv[1:] or list(known)
    if unknown := set(wanted) - set(known):
        sys.exit(f"lm_gpu: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    facts = {"gpu": torch.cuda.get_device_name(0), "gpus": GPUS, "model": MODEL, "torch": torch.__version__}
    work = Path(tempfile.mkdtemp(prefix="gpt-gpu-"))
    try:
        (work / "data").mkdir()
        kind = "uint16" if VOCABULARY <= 1 << 16 else "uint32"
        (work / "data/meta.json").write_text(json.dumps({"dtype": kind, "vocab_size": VOCABULARY, "digest": None}))
        for split, count in (("train", 20_000_000), ("val", 2_000_000)):
            tokens = np.random.default_rng(1).integers(0, VOCABULARY, count, dtype=kind)
            tokens.tofile(work / f"data/{split}.bin")
        for name in wanted:
            left = until - time.monotonic() - 3
            if left < 20:
                result: dict[str, object] = {"skipped": "no time left"}
            elif name == "nanogpt":
                result = nanogpt(known[name][0], work, left)
            else:
                result = ours(name, known[name], work, left)
            print(json.dumps({"name": name, **facts, "options": " ".join(known[name]), **result}), flush=True)
            if "failed" in result:
                lines = (work / f"{name}.log").read_text(errors="replace").splitlines()
                print("\n".join(f"  {name}: {line}" for line in lines[-30:]), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
