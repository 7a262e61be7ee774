#!/usr/bin/env python3
"""scripts/bench report: how long ``clusterctl report`` takes for a day of a run, and how large the page is.

The run is a folder of ``clusterctl collect``: a step every two seconds in the log and the events of rank 0's node, and
a sample every ten seconds of 8 GPUs, the network and InfiniBand on every node, as agents write them. The figure is the
whole command. ``--profile`` prints where its time goes instead.
"""

import argparse
import cProfile
import json
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
RUN = "20261123-101500-sft-1a2b"
BEGAN = 1_795_396_000.0
EVERY = 10  # seconds between samples
PACE = 2  # seconds of a step
GIB = 1 << 30
COMMAND = "from provision.cli import main; main()"
LINE = "{'loss': '%.4f', 'grad_norm': '%.3f', 'learning_rate': '%.6g', 'epoch': '%.3f'}\n"


def write(folder: Path, nodes: int, seconds: int) -> None:
    """Writes the run's folder."""
    rng = random.Random(7)
    steps = seconds // PACE
    for rank in range(nodes):
        place = folder / f"node{rank + 1:02}"
        place.mkdir(parents=True)
        with (place / "metrics.jsonl").open("w") as file:
            for at in range(0, seconds, EVERY):
                file.write(json.dumps(sample(rng, at), separators=(",", ":")) + "\n")
        with (place / "events.jsonl").open("w") as file:
            file.write(event("attempt", 0, checkpoint=None, port=29500))
            for step in range(1, steps if rank == 0 else 0):
                at = PACE * step + rng.random() / 5
                file.write(event("progress", at, step=step, total=steps, loss=loss(rng, step)))
            file.write(event("end", seconds, state="finished", why=None, step=steps - 1, saved=True))
        (place / "state.json").write_text(json.dumps({"run": RUN, "state": "finished", "node_rank": rank}))
    with (folder / "node01" / "run.log").open("w") as file:
        for step in range(1, steps):
            file.write(LINE % (loss(rng, step), rng.random(), 1e-4 * (1 - step / steps), step / 5000))


def loss(rng: random.Random, step: int) -> float:
    """A loss that falls, with noise."""
    return round(1 + 9 / (1 + step / 500) + rng.random() / 10, 4)


def event(kind: str, at: float, **more: object) -> str:
    """A line of ``events.jsonl``."""
    return json.dumps({"event": kind, "time": round(BEGAN + at, 3), "attempt": 1, **more}) + "\n"


def sample(rng: random.Random, at: int) -> dict[str, object]:
    """A line of ``metrics.jsonl``."""
    gpus = [
        {"index": index, "use": rng.randint(80, 100), "memory": rng.randint(60, 70) * GIB, "memory_total": 80 * GIB,
         "power": round(rng.uniform(400, 700), 2), "temperature": rng.randint(50, 70)}
        for index in range(8)
    ]  # fmt: skip
    ports = {f"mlx5_{port}/1": {"in": rng.randint(0, 10**10), "out": rng.randint(0, 10**10)} for port in range(8)}
    return {
        "time": round(BEGAN + at + rng.random(), 3), "rss": rng.randint(10, 20) * GIB, "gpus": gpus,
        "memory_total": 2048 * GIB, "memory_available": rng.randint(1000, 1500) * GIB, "load": rng.uniform(0, 90),
        "disk_free": 10**12, "cpu": {str(rank): round(rng.uniform(1, 3), 2) for rank in range(8)},
        "network": {"eth0": {"in": rng.randint(0, 10**6), "out": rng.randint(0, 10**6)}}, "infiniband": ports,
        "attempt": 1, "step": at // PACE,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench report", description=__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--times", type=int, default=3, help="how often it is measured (3)")
    parser.add_argument("--profile", action="store_true", help="print the functions that take the time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as scratch:
        folder, page = Path(scratch) / RUN, Path(scratch) / "report.html"
        write(folder, arguments.nodes, round(arguments.hours * 3600))
        if arguments.profile:
            profile(folder)
            return 0
        seconds, used = [], []
        for _ in range(arguments.times):
            started, before = time.perf_counter(), cpu()
            argv = [sys.executable, "-c", COMMAND, "report", folder, "-o", page]
            subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            seconds.append(round(time.perf_counter() - started, 2))
            used.append(round(cpu() - before, 2))
        found = {"seconds": median(seconds), "cpu": median(used), "all": seconds, "bytes": page.stat().st_size}
    what = f"{arguments.nodes} nodes, {arguments.hours:g} h"
    print(f"{what}: {found['seconds']} s {seconds}, CPU {found['cpu']} s, {found['bytes'] / 1e6:.1f} MB")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def cpu() -> float:
    """The processor time of the commands so far: on a busy machine it says more than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def profile(folder: Path) -> None:
    """Prints the functions that take the most time."""
    sys.path.insert(0, str(ROOT))
    from provision.report import report_page  # noqa: PLC0415 - the path is known only now
    from provision.tasks.report import report_folder  # noqa: PLC0415

    recorded = cProfile.Profile()
    recorded.enable()
    report_page([report_folder(folder).run], time.time())
    recorded.disable()
    pstats.Stats(recorded).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    sys.exit(main())
