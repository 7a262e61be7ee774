"""Training on one GPU beside its peers: every figure with its limits, and the raw lines in a file.

    PYTHON=/path/to/python scripts/bench train [PART...] [--raw train.jsonl]

Parts: ``decoder`` (Llama-3-8B, forward and backward), ``finetune`` (3 B parameters on short instructions, beside
LLaMA-Factory), ``gpt2`` (GPT-2 XL, with the optimizer), ``saves`` (how long the training of 8 B parameters stops;
needs 128 GB on the GPUs and as much on the disk and in host memory), ``tokens`` (tokenising 1 GiB, on CPUs), ``fp8``
(to the same validation loss), ``vision`` (padding, and mixed batches beside text), ``tune`` (``plan --tune``). The
Python needs torch, and for peers transformers, LLaMA-Factory, liger-kernel and torchao: a way whose packages are
missing says so. Three quarters of an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS = {
    "decoder": ["decoder_gpu.py"],
    "finetune": ["finetune_gpu.py"],
    "gpt2": ["lm_gpu.py", "ours", "fp8"],
    "saves": ["lm_gpu.py", "saves-fsdp"],
    "tokens": ["lm_tokens.py"],
    "fp8": ["fp8_gpu.py"],
    "vision": ["vlm_gpu.py"],
    "tune": ["tune_gpu.py"],
}
VARIABLES = {"saves": {"MODEL": "llama-3-8b", "BATCH": "1", "SECONDS_IN_ALL": "900"}}
# Part, way, key, what it is, must and aim.
FIGURES = (
    ("decoder", "ours", "tokens_s", "Llama-3-8B, 1 x 8192, forward and backward, bf16", 11300, 12000),
    ("decoder", "ours-fp8", "tokens_s", "the same in fp8", 13500, 14500),
    ("finetune", "ours", "useful_tokens_s", "fine-tuning of 3.09 B, useful tokens/s", 20000, 26000),
    ("finetune", "ours-fp8", "useful_tokens_s", "the same in fp8", 20000, 32000),
    ("gpt2", "ratio", "ratio", "GPT-2 XL, fp8 beside bf16, tokens/s", 1.1, 1.25),
    ("saves", "paused", "seconds", "seconds that the training stops for a save, Llama-3-8B with AdamW", 2, 1),
    ("tokens", "ratio", "ratio", "tokenising 1 GiB, time of `tokenizers` alone", 1.1, 1.02),
    ("fp8", "ratio", "ratio", "fp8 to the same validation loss, Llama-3.2-1B, time of bf16's", 0.97, 0.85),
    ("vision", "qwen2.5-vl-7b trained", "padding", "Qwen2.5-VL-7B, share of padding in tokens", 0.03, 0.01),
    ("vision", "qwen2.5-vl-7b trained", "ratio", "Qwen2.5-VL-7B, time of a mixed batch beside text", 1.15, 1.05),
    ("vision", "qwen2.5-vl-7b frozen", "ratio", "the same with the tower frozen", 1.15, 1.05),
    ("vision", "llava-onevision-7b trained", "ratio", "LLaVA-OneVision-7B, the same, trained", 1.15, 1.05),
    ("tune", "", "median", "plan --tune, median speed-up", 2, 4),
)


def lines_of(part: str, argv: list[str]) -> list[dict[str, Any]]:
    """Run a program and return the JSON lines that it prints, with the part's name."""
    program, *words = argv
    run = subprocess.Popen(
        [sys.executable, str(HERE / program), *words],
        env={**os.environ, **VARIABLES.get(part, {})},
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    found = []
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("{"):
            sys.stdout.write(line)
            sys.stdout.flush()
            found.append({"part": part, **json.loads(line)})
    if run.wait():
        found.append({"part": part, "failed": f"{program} exited with {run.returncode}"})
    return found


def derived(part: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return figures that several lines make, or that a line has among others."""
    named = {row["name"]: row for row in rows if "name" in row}
    speeds = [named.get(name, {}).get("tokens_per_second") for name in ("ours", "fp8")]
    if part == "gpt2" and all(speeds):
        return [{"part": part, "way": "ratio", "ratio": round(speeds[1] / speeds[0], 3)}]
    saves = named.get("saves-fsdp", {})
    if part == "saves" and saves.get("saves_took_paused_s"):
        pairs = zip(saves["saves_took_paused_s"], saves["slower_after_save_s"], strict=True)
        return [{"part": part, "way": "paused", "seconds": max(paused + slower for (_, paused), slower in pairs)}]
    return []


def table(rows: list[dict[str, Any]]) -> str:
    """The figures beside their limits, and each peer below."""
    lines = ["| figure | measured | must | aim |", "|---|---|---|---|"]
    for part, way, key, what, must, aim in FIGURES:
        found = [row[key] for row in rows if row["part"] == part and row.get("way", "") == way and key in row]
        lines.append(f"| {what} | {found[-1] if found else 'not measured'} | {must} | {aim} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], metavar="PART")
    parser.add_argument("--raw", type=Path, default=Path("train.jsonl"))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part in given.parts or PARTS:
        found = lines_of(part, PARTS[part])
        rows += [*found, *derived(part, found)]
        given.raw.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(table(rows))


if __name__ == "__main__":
    main()
