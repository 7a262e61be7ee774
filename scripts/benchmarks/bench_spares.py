"""Seconds from the loss of a node until the program has started again on all nodes, with real agents on this machine.

    scripts/bench spares [--nodes 16] [--runs 3] [--lost 0,5]

Each node is an agent with its own loopback address and folder, and starts one small Python program that has a
checkpoint on every node. A lost node is ``kill -9`` of both processes of its agent and of its program: the kernel
closes its connections. ``--lost`` are the positions to kill, one after the other; 0 is the hub. A node that is only
silent (no power) is noticed ``--lost-after`` later, which is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "trainer/agent"
PROGRAM = """
import json, os, pathlib, time
folder = pathlib.Path("out/step-1")
folder.mkdir(parents=True, exist_ok=True)
(folder / "state.json").write_text('{"step": 1}')
(folder / "complete.json").write_text('{"files": {"state.json": 11}}')
time.sleep(600)
"""
LIMIT = 120.0  # seconds for one replacement


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--lost", default="0,5", help="positions, separated by commas")
    given = parser.parse_args()
    for position in map(int, given.lost.split(",")):
        found = [measure(given.nodes, position) for _ in range(given.runs)]
        what = "the hub (rank 0)" if position == 0 else f"node {position}"
        each = " ".join(f"{seconds:.1f}" for seconds in found)
        print(f"{given.nodes} nodes, {what} lost: {statistics.median(found):.1f} s ({each})", flush=True)
    print(f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores")


def measure(count: int, lost: int) -> float:
    """One run with one spare."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, f"node{position}") for position in range(count + 1)]
        run = f"bench-{secrets.token_hex(4)}"
        link = {
            "host": "127.0.0.1",
            "port": free_port(),
            "token": secrets.token_hex(16),
            "nodes": [f"n{position}" for position in range(count + 1)],
            "others": [[f"127.0.0.{position + 1}", free_port()] for position in range(1, count + 1)],
        }
        try:
            for position, folder in enumerate(folders):
                folder.mkdir()
                (folder / "plan.json").write_text(json.dumps(plan(run, position, count, link)))
            started = [agent("start", folder) for folder in folders]
            for each in started:
                each.wait(timeout=LIMIT)
            wait(lambda: all((folder / "out/step-1/complete.json").exists() for folder in folders[:count]))
            kill(folders[lost], run, f"n{lost}")
            at = time.time()
            left = [folder for position, folder in enumerate(folders) if position != lost]
            wait(lambda: all(starts(folder, after=at) for folder in left))
            return max(starts(folder, after=at)[0] for folder in left) - at
        finally:
            for each in [agent("stop", folder) for folder in folders]:
                each.wait(timeout=LIMIT)


def plan(run: str, position: int, count: int, link: dict[str, Any]) -> dict[str, Any]:
    """A node's plan."""
    place = {"node": f"n{position}", "node_rank": position, "nnodes": count, "first_rank": position % count}
    program = {"argv": [sys.executable, "-c", PROGRAM], "env": {}, "each_rank": True, "logs": "logs", "cwd": "."}
    rest = {"resume": {"output": "out"}, "none_ok": True, "port": 29400, "grace": 1.0}
    return {"version": 2, "run": run, "link": link, **place, **program, **rest}


def agent(what: str, folder: Path) -> subprocess.Popen[bytes]:
    """A command of a node's agent."""
    argv = [sys.executable, "-IB", str(AGENT), what, str(folder / "plan.json")]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def starts(folder: Path, after: float) -> list[float]:
    """When the program has started on a node after a time."""
    lines = (folder / "logs/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"started"' in line]
    return [event["time"] for event in events if event["time"] > after]


def kill(folder: Path, run: str, node: str) -> None:
    """Kill everything of a node."""
    state = json.loads((folder / "logs/state.json").read_text())
    for key in ("guard", "pid"):
        os.kill(state[key], signal.SIGKILL)
    marks = {f"CLUSTERCTL_RUN={run}".encode(), f"CLUSTERCTL_NODE={node}".encode()}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            if marks <= set((path / "environ").read_bytes().split(b"\0")):
                os.kill(int(path.name), signal.SIGKILL)


def wait(true: Any) -> None:
    """Wait until something is true; only files show it."""
    limit = time.monotonic() + LIMIT
    while not true():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {LIMIT} s")
        time.sleep(0.1)


def free_port() -> int:
    """A free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
