#!/usr/bin/env python3
"""scripts/bench start: CPU time of starts, each beside the interpreter alone, in turn.

- An agent's whole life with a command that does nothing, with modules that are compiled (a node's second run) and with
  modules that are not (its first run).
- ``clusterctl status`` until it would connect to the first node.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLAN = {"version": 2, "run": "r", "node": "n", "argv": ["/bin/true"], "env": {}, "logs": "logs"}
INVENTORY = "prefix: /opt/llm/current\nnodes:\n  node01: 127.0.0.1\n"
# A process that ends where it would connect.
STATUS = """
import os, sys
import provision.ssh.remote
provision.ssh.remote._connect = lambda *_: os._exit(0)
from provision.cli import main
sys.argv = ["clusterctl", "status"]
main()
sys.exit("no connection was tried")
"""


def used(argv: Sequence[str | Path], cwd: Path) -> float:
    """Seconds of CPU time of a program and its children.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, cwd=cwd, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def agent(folder: Path, *, compiled: bool) -> float:
    """CPU time of an agent's life."""
    code, run = folder / "agent", folder / "run"
    if not compiled:
        for cache in list(code.rglob("__pycache__")):
            shutil.rmtree(cache)
    run.mkdir(mode=0o700)
    try:
        (run / "plan-0.json").write_text(json.dumps(PLAN), encoding="utf-8")
        return used([sys.executable, "-IS", code, "run", run / "plan-0.json"], folder)
    finally:
        shutil.rmtree(run)


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench start", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="times each of them runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "trainer/agent", folder / "agent")
        (folder / "inventory.yaml").write_text(INVENTORY, encoding="utf-8")
        ways: dict[str, Callable[[], float]] = {
            "the interpreter alone": lambda: used([sys.executable, "-IS", "-c", "pass"], folder),
            "agent, modules not compiled": lambda: agent(folder, compiled=False),
            "agent, modules compiled": lambda: agent(folder, compiled=True),
            "clusterctl status, before the first connection": lambda: used([sys.executable, "-c", STATUS], folder),
        }
        for way in ways.values():
            way()
        series: dict[str, list[float]] = {title: [] for title in ways}
        for _ in range(given.runs):
            for title, way in ways.items():
                series[title].append(way())
    print(f"Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, {given.runs} runs in turn, CPU time")
    print(f"{'':48} median   least")
    for title, values in series.items():
        print(f"{title:48} {statistics.median(values):.3f} s  {min(values):.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
