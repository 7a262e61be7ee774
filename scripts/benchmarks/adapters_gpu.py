"""Trains a model with random weights for a few steps with LoRA, QLoRA, small optimizers and fp8 on one GPU.

    MODEL=llama-3.2-1b python scripts/benchmarks/adapters_gpu.py [CASE…]

Prints a line of JSON for each case: speed, memory, losses. Needs the packages of ``trainer.lm``; ``qlora`` needs
bitsandbytes and ``fp8`` needs torchao.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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

from trainer.lm import weights  # noqa: E402 - the checkout is not installed here
from trainer.lm.families import PUBLISHED  # noqa: E402
from trainer.lm.lora import in_order  # noqa: E402
from trainer.lm.model import first_weights  # noqa: E402

MODEL = os.environ.get("MODEL", "llama-3.2-1b")
BLOCK = int(os.environ.get("BLOCK", "2048"))
VOCABULARY = 50257  # of the random tokens
STEPS = 8
WARM = 3
ADAPTERS = ["--lora-rank", "16", "--learning-rate", "1e-3"]
CASES = {
    "adamw": [],
    "adamw-bf16": ["--optimizer", "adamw-bf16"],
    "adamw8bit": ["--optimizer", "adamw8bit"],
    "muon": ["--optimizer", "muon"],
    "fp8": ["--fp8", "auto"],
    "lora": ADAPTERS,
    "lora-dropout": [*ADAPTERS, "--lora-dropout", "0.05"],
    "qlora": [*ADAPTERS, "--quantize", "nf4"],
    "qlora-eager": [*ADAPTERS, "--quantize", "nf4", "--compile", "off"],
    "profile": [*ADAPTERS, "--profile"],
}


def make_base(folder: Path) -> None:
    """Write a model with random weights in bf16, for ``--init``."""
    shape = replace(PUBLISHED[MODEL], vocab_size=VOCABULARY)
    folder.mkdir()
    drawn = in_order(first_weights(shape, 1, torch.device("cuda")))
    weights.export(shape, drawn, folder, dtype="bfloat16")


def run(name: str, work: Path, batch: str) -> dict[str, object]:
    out = work / name
    argv = ["--data", str(work / "data"), "--init", str(work / "base"), "--out", str(out), "--block-size", str(BLOCK)]
    argv += ["--batch-size", batch, "--max-iters", str(STEPS), "--eval-interval", "0", "--save", "false"]
    argv += ["--trackers", "none", *CASES[name]]
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trainer.lm", *argv],
        cwd=HERE, env=dict(os.environ, PYTHONPATH=paths), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    result: dict[str, object] = {"seconds": round(time.monotonic() - begin, 1)}
    result["says"] = re.findall(r"^(?:LoRA|fp8|profile): .*", done.stdout, re.MULTILINE)
    if done.returncode:
        return {**result, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}
    records = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    steps = [each for each in records if "ms" in each]
    result["tokens_per_second"] = round(statistics.median(each["tokens_per_second"] for each in steps[WARM:]))
    result["mfu"] = round(statistics.median(each["mfu"] or 0 for each in steps[WARM:]), 4)
    result["gb_peak"] = round(max(each["memory"] or 0 for each in steps) / 1e9, 2)
    result["optimizer_ms"] = round(statistics.median(each["optimizer_ms"] for each in steps[WARM:]), 1)
    return {**result, "losses": [round(each["loss"], 4) for each in (steps[0], steps[-1])]}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("adapters_gpu: torch sees no GPU here")
    wanted = sys.argv[1:] or list(CASES)
    facts = {"gpu": torch.cuda.get_device_name(0), "model": MODEL, "torch": torch.__version__}
    work = Path(tempfile.mkdtemp(prefix="adapters-gpu-"))
    try:
        (work / "data").mkdir()
        for split, count in (("train", 4_000_000), ("val", 200_000)):
            tokens = np.random.default_rng(1).integers(0, VOCABULARY, count, dtype=np.uint16)
            tokens.tofile(work / f"data/{split}.bin")
        make_base(work / "base")
        torch.cuda.empty_cache()
        for name in wanted:
            print(json.dumps({"name": name, **facts, **run(name, work, os.environ.get("BATCH", "4"))}), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
