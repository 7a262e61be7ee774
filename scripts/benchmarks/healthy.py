"""Trains without any fault for hours, and counts the false alarms: of a straggler, or of a run that is slow as a whole.

    scripts/benchmarks/healthy.py [--jobs 40] [--minutes 60] [--out FOLDER]

Needs Linux, Python and torch alone: it starts the agents as clusterctl would. The jobs run side by side with 2 to 4
ranks each, which train with DistributedDataParallel over gloo. They differ in the time of a step, the work of a core,
the data loader's workers and the traffic. Every second job has an agent for each of two nodes, with the link between
them. Each is judged with rounds of 20 s, and with a band that ends 25 % above its time of a step.

Prints one line of JSON: the healthy hours of all jobs together, the rounds that were judged, and the alarms. FOLDER
gets the rounds of jobs with an alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "tests/nodes/trainers/uneven.py"
PORTS = 20000  # below those that the kernel gives to connections
ALARMS = ("slowdown", "full")  # kinds of notices
STOP = 60.0  # seconds in which a job must stop


class Job:
    """One training, with one agent or two."""

    def __init__(self, folder: Path, number: int, dice: random.Random) -> None:
        self.folder = folder
        self.ranks = dice.choice((2, 2, 3, 4))
        self.step = dice.choice((0.1, 0.2, 0.4, 0.8, 1.5))
        nodes = 2 if number % 2 and self.ranks != 3 else 1
        work = self.step * dice.choice((0.02, 0.05, 0.1))
        words = ["--steps", "10000000", "--step", str(self.step), "--work", f"{work:.4f}"]
        words += ["--width", str(dice.choice((64, 1024, 8192))), "--workers", str(dice.choice((0, 0, 1, 2)))]
        (folder / "logs").mkdir(parents=True)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        env = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(self.ranks), "OMP_NUM_THREADS": "1", **kept}
        names = [f"job{number}-node{rank}" for rank in range(nodes)]
        link = {"host": "127.0.0.1", "port": PORTS + 2 * number, "token": secrets.token_hex(16), "nodes": names}
        band = {"version": 1, "basis": "the job's own step", "step_seconds": [self.step, 1.25 * self.step]}
        self.agents = []
        for rank, name in enumerate(names):
            each = self.ranks // nodes
            plan: dict[str, Any] = {
                "version": 2,
                "run": f"healthy-{number}",
                "node": name,
                "node_rank": rank,
                "nnodes": nodes,
                "argv": [sys.executable, str(TRAINER), *words],
                "env": env,
                "processes": each,
                "first_rank": rank * each,
                "each_rank": True,
                "port": PORTS + 2 * number + 1,
                "logs": f"logs/node{rank}",
                "link": link if nodes > 1 else None,
                "expected": band,
            }
            path = folder / f"plan-{rank}.json"
            path.touch(0o600)
            path.write_text(json.dumps(plan))
            (folder / f"logs/node{rank}").mkdir()
            argv = [sys.executable, "-I", str(ROOT / "trainer/agent"), "run", str(path)]
            self.agents.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The records in a file of rank 0's node."""
        with contextlib.suppress(OSError):
            text = (self.folder / "logs/node0" / name).read_text(errors="replace")
            return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        return []

    def stop(self) -> None:
        """Stop it."""
        for agent in self.agents:
            agent.send_signal(signal.SIGTERM)
        limit = time.monotonic() + STOP
        for agent in self.agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(max(0.0, limit - time.monotonic()))
            agent.kill()

    def result(self) -> dict[str, Any]:
        """The hours from the first round to the last, and the alarms."""
        rounds, events = self.lines("rounds.jsonl"), self.lines("events.jsonl")
        times = [float(each["time"]) for each in rounds]
        alarms = [each for each in events if each["event"] == "straggler" or each.get("kind") in ALARMS]
        ends = [each for each in events if each["event"] == "end"]
        seconds = times[-1] - times[0] if times else 0.0
        return {"seconds": seconds, "rounds": len(times), "alarms": alarms, "end": ends[-1]["state"] if ends else None}


def measure(jobs: int, minutes: float, out: Path | None, seed: int) -> dict[str, Any]:
    """Run the jobs, and count."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        started = [Job(Path(name) / str(number), number, dice) for number in range(jobs)]
        try:
            time.sleep(60 * minutes)  # the measured time itself
        finally:
            for job in started:
                job.stop()
        results = [job.result() for job in started]
        for number, (job, result) in enumerate(zip(started, results, strict=True)):
            if out and (result["alarms"] or result["end"] != "stopped"):
                shutil.copytree(job.folder / "logs/node0", out / str(number), dirs_exist_ok=True)
    hours = sum(each["seconds"] for each in results) / 3600
    alarms = [alarm for each in results for alarm in each["alarms"]]
    return {
        "hours": round(hours, 2),
        "jobs": jobs,
        "rounds": sum(each["rounds"] for each in results),
        "not_stopped": [number for number, each in enumerate(results) if each["end"] != "stopped"],
        "stragglers": len([each for each in alarms if each["event"] == "straggler" and each["state"] == "slow"]),
        "slowdowns": len([each for each in alarms if each["event"] != "straggler"]),
        "alarms": alarms[:20],
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the jobs' differences")
    parser.add_argument("--out", type=Path, help="the folder for rounds and events of jobs with an alarm")
    given = parser.parse_args()
    print(json.dumps(measure(given.jobs, given.minutes, given.out, given.seed)))


if __name__ == "__main__":
    main()
