#!/usr/bin/env python3
"""scripts/bench reader: how fast ``trainer.reader`` reads logs of hundreds of MB, and in how much memory.

Each log is generated, read by a new process, and removed. ``--size MB`` is their size.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = 4 << 20

WORDS = "[INFO|trainer.py:%d] 2026-11-23 03:06:39,475 >> what a library says of itself, its files and its versions\n"
BAR = "\r %2d%%|%s| %d/900000 [05:00<00:00, 31.92it/s]"
LINE = "{'loss': '5.214', 'grad_norm': '2.931', 'learning_rate': '0.0008929', 'epoch': '0.1429'}\n"
NANOGPT = "iter %d: loss 4.4064, time 61.69ms, mfu 41.20%%\n"
TITAN = (
    "[titan] 2026-05-18 16:04:46,338 - root - INFO - step: %d  loss:  3.24405  grad_norm:  2.0321  memory: 10.56GiB"
    "(11.12%%)  tps: 7,282  tflops: 42.11  mfu: 13.50%%\n"
)
FAIRSEQ = (
    "2026-01-01 10:00:00 | INFO | train_inner | epoch 001:     %d / 900000 loss=10.512, nll_loss=10.112, ppl=1000.5,"
    " wps=31234.5, ups=8.51, wpb=3670.1, bsz=128.3, num_updates=%d, lr=1e-05, gnorm=2.1, loss_scale=128, wall=20\n"
)
JSON = '{"step": %d, "train/loss": 2.3456, "lr": 0.0001, "epoch": 0.1}\n'
HAND = "step %d loss 2.31\n"
LOST = "10 packets transmitted, 10 received, 0%% packet loss, time %dms rtt min 0.1 avg 0.2\n"
RECORD = (
    '{"current_steps": %d, "total_steps": 900000, "loss": 5.559948921203613, "lr": 0.0009642857142857143, "epoch": 0.1,'
    ' "percentage": 7.14, "elapsed_time": "0:05:00", "remaining_time": "9:00:00", "throughput": 7283.44}\n'
)

READ = """
import json, re, sys, time
from pathlib import Path
from trainer.reader import Reader
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before, started, used, count, reader = peak(), time.perf_counter(), time.process_time(), 0, Reader()
with open(sys.argv[1], "rb") as log:
    while block := log.read(256 << 10):
        count += len(reader.feed(block))
count += len(reader.close())
print(json.dumps([count, time.perf_counter() - started, time.process_time() - used, peak() - before]))
"""


def trained(step: int) -> str:
    """The output of the Trainer and its libraries for two steps: words, a bar, a line."""
    words = "".join(WORDS % number for number in range(10))
    return words + "".join(BAR % (7, "#" * 10, step) for _ in range(10)) + f"\r{' ' * 60}\r{LINE}" + BAR % (7, "", step)


KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "trainer": ("transformers: words, progress bar, lines", trained),
    "words": ("no numbers at all", lambda step: WORDS % (step % 5000)),
    "nanogpt": ("nanoGPT: nothing but numbers", lambda step: NANOGPT % step),
    "titan": ("torchtitan: nothing but numbers", lambda step: TITAN % step),
    "fairseq": ("fairseq: nothing but numbers", lambda step: FAIRSEQ % (step, step)),
    "json": ("JSON of another program: nothing but numbers", lambda step: JSON % step),
    "hand": ("a hand-written loop: a step and a loss", lambda step: HAND % step),
    "lost": ("lines with the word loss, without a training", lambda step: LOST % step),
    "records": ("trainer_log.jsonl: nothing but numbers", lambda step: RECORD % step),
}


def write(path: Path, line: Callable[[int], str], size: int) -> int:
    """Writes a log of at least ``size`` bytes; returns its size."""
    step = written = 0
    with path.open("wb") as log:
        while written < size:
            lines = []
            length = 0
            while length < BLOCK:
                step += 1
                lines.append(line(step).encode())
                length += len(lines[-1])
            written += log.write(b"".join(lines))
    return written


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench reader", description=__doc__)
    parser.add_argument("--size", type=int, default=300, metavar="MB", help="of each log (300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, logs of {arguments.size} MB")
    print(f"{'log':<46}{'MB/s':>8}{'of CPU time':>13}{'readings/s':>13}{'memory':>10}")
    found = {}
    for name, (title, line) in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
            path = Path(folder) / "log"
            size = write(path, line, arguments.size * 1_000_000)
            done = subprocess.run(
                [sys.executable, "-c", READ, path], cwd=ROOT, capture_output=True, text=True, check=True
            )
        count, seconds, used, memory = json.loads(done.stdout)
        found[name] = {"bytes": size, "readings": count, "seconds": seconds, "cpu": used, "memory": memory}
        speeds = f"{size / seconds / 1e6:>8.0f}{size / used / 1e6:>13.0f}{count / used:>13,.0f}"
        print(f"{title:<46}{speeds}{memory / 1e6:>7.1f} MB", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
