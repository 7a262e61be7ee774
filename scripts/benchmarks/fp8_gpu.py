"""How long fp8 and bf16 need to the same validation loss, on one GPU: both curves, and a line of JSON with the ratio.

    scripts/benchmarks/fp8_gpu.py [--model llama-3.2-1b] [--seconds 150] [--text FOLDER] [--megabytes 64]

Trains ``trainer.lm`` from random weights on real text: the Python sources in FOLDER, by default those of the installed
packages, with a BPE of 32,000 tokens trained on them. Both trainings see the same samples in the same order. The lowest
loss that both reach is the common one; the time is that of their steps, without evaluations and compilation.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
WARM = 10  # steps whose time is replaced by the median: they compile
EVERY = 40  # steps between evaluations


def text(folder: Path, megabytes: int, into: Path) -> None:
    """Write Python sources, in random order, up to a size."""
    found = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(found)
    with into.open("wb") as file:
        for path in found:
            file.write(path.read_bytes())
            if file.tell() > megabytes << 20:
                return


def program(name: str, *argv: str) -> None:
    """Run a program of the trainer, and show its output only if it fails."""
    run = subprocess.run(
        [sys.executable, "-m", name, *argv], cwd=HERE, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if run.returncode:
        sys.exit(run.stdout[-2000:] + run.stderr[-2000:])


def curve(out: Path) -> list[tuple[float, int, float]]:
    """Return seconds of training, step and validation loss of each evaluation."""
    records = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [each["ms"] for each in records if "ms" in each]
    usual = sorted(times)[len(times) // 2]
    found, seconds = [], 0.0
    for each in records:
        if "ms" in each:
            seconds += (usual if each["current_steps"] <= WARM else min(each["ms"], 3 * usual)) / 1e3
        if "eval_loss" in each:
            found.append((seconds, each["current_steps"], float(each["eval_loss"])))
    return found


def reached(points: list[tuple[float, int, float]], loss: float) -> float:
    """Return the seconds at which a curve first reaches a loss, between two evaluations in a straight line."""
    before = points[0]
    for point in points:
        if point[2] <= loss:
            share = (before[2] - loss) / (before[2] - point[2]) if before[2] > point[2] else 1.0
            return before[0] + share * (point[0] - before[0])
        before = point
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    parser.add_argument("--megabytes", type=int, default=64)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8-") as name:
        work = Path(name)
        text(given.text, given.megabytes, work / "text.txt")
        began = time.monotonic()
        program("trainer.lm.prepare", str(work / "text.txt"), "--out", str(work / "data"), "--tokens", "bpe",
                "--vocab-size", "32000")  # fmt: skip
        curves: dict[str, list[tuple[float, int, float]]] = {}
        facts: dict[str, Any] = {"model": given.model, "prepare_s": round(time.monotonic() - began)}
        for way, more in (("bf16", []), ("fp8", ["--fp8", "auto"])):
            argv = ["--data", str(work / "data"), "--model", given.model, "--block-size", str(given.block)]
            argv += ["--batch-size", str(given.batch), "--max-iters", str(given.steps), "--warmup-iters", "40"]
            argv += ["--eval-interval", str(EVERY), "--eval-iters", "20", "--save", "false", "--trackers", "none"]
            program("trainer.lm", *argv, "--compile", "blocks", "--out", str(work / way), *more)
            curves[way] = curve(work / way)
            sys.stdout.write(json.dumps({"way": way, **facts, "curve": curves[way]}) + "\n")
            sys.stdout.flush()
    lowest = max(points[-1][2] for points in curves.values())
    seconds = {way: round(reached(points, lowest), 2) for way, points in curves.items()}
    ratio = round(seconds["fp8"] / seconds["bf16"], 4)
    sys.stdout.write(json.dumps({"way": "ratio", **facts, "loss": lowest, "seconds": seconds, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()
