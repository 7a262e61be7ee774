"""What copies of checkpoints and saving to memory cost a training: ``docs/benchmarks.md``.

    scripts/bench copies [--gigabytes 2] [--seconds 60] [--runs 3] [--rate 1gbit] [--only slowdown,memory]

Needs root. Two network namespaces are joined by a link of that rate (``tc tbf``), with an agent and a rank in each. A
step exchanges gradients over the link and waits for a device: the link is busy for about half of it. Runs with and
without copies take turns, and save equally.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.agent.contract.plan import RAM

AGENT = Path(__file__).resolve().parents[2] / "trainer/agent"
ADDRESSES = ("10.231.77.1", "10.231.77.2")
# Enters a mount namespace with the file system of the service ``tmpfs``.
HUGE = f"""
mount -t tmpfs tmpfs /run && mkdir -p {RAM} && mount -t tmpfs -o mode=1777,huge=always tmpfs {RAM} && exec "$@"
"""
LINK, EXCHANGE = 29876, 29877  # ports
WARM = 20  # steps before the save, which are not counted
PATIENCE = 600.0  # seconds for a run beyond its own time

# Arguments: the output folder, bytes of this node's parts, seconds to train after the save, flush, and how many
# processes write a part each, as the ranks of a node do. Writes each step's seconds, and the seconds of the save. The
# checkpoint is one that the agent knows by its complete.json.
RANK = """
import json, os, socket, sys, threading, time
out, size, seconds, flush = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4] == "1"
writers = int(sys.argv[5])
rank, (mine, other) = int(os.environ["RANK"]), json.loads(os.environ["ADDRESSES"])
port, warm, gradients = int(os.environ["PORT"]), int(os.environ["WARM"]), 6 << 20
peer = None
if other:
    if rank == 0:
        server = socket.create_server((mine, port)); peer, _ = server.accept()
    else:
        limit = time.monotonic() + 60
        while peer is None:
            try:
                peer = socket.create_connection((other, port), 5)
            except OSError:
                if time.monotonic() > limit: raise
                time.sleep(0.1)
    peer.settimeout(120)
data = bytes(gradients)
def exchange():
    sender = threading.Thread(target=peer.sendall, args=(data,)); sender.start()
    left = gradients
    while left:
        got = peer.recv(min(left, 1 << 20))
        if not got: raise SystemExit("the other rank left")
        left -= len(got)
    sender.join()
def step():
    began = time.monotonic()
    if peer: exchange()
    time.sleep(0.05)  # the device's time
    return time.monotonic() - began
for _ in range(warm): step()
parts = ["part-%d-of-%d.safetensors" % (each, 2 * writers) for each in range((2 if other else 1) * writers)]
folder, hidden = out + "/iter_20", out + "/saving"
os.makedirs(hidden)
block = os.urandom(8 << 20)
def write(part, size):
    with open(hidden + "/" + part, "wb") as file:
        head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        file.write(len(head).to_bytes(8, "little") + head)
        for at in range(0, size, len(block)): file.write(block[:size - at])
        file.flush()
        if flush: os.fsync(file.fileno())
began = time.monotonic()
others = []
for part in parts[rank * writers + 1:(rank + 1) * writers]:
    others.append(os.fork())
    if not others[-1]:
        write(part, size // writers)
        os._exit(0)
write(parts[rank * writers], size // writers)
if any(os.waitpid(each, 0)[1] for each in others): raise SystemExit("a part was not written")
if rank == 0:
    with open(hidden + "/complete.json", "w") as file:
        json.dump({"files": dict.fromkeys(parts, 0)}, file)
os.rename(hidden, folder)
saved = time.monotonic() - began
def arrived():
    try:
        with open("/sys/class/net/c0/statistics/rx_bytes") as file: return int(file.read())
    except OSError:
        return 0
steps, until, before = [], int(seconds / 0.11), arrived()
while len(steps) < until: steps.append(step())
other_bytes = arrived() - before - until * gradients  # with headers
with open("result.json", "w") as file: json.dump({"steps": steps, "saved": saved, "other_bytes": other_bytes}, file)
"""


def tool(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


@contextlib.contextmanager
def namespaces(rate: str) -> Iterator[list[str]]:
    """Two network namespaces, joined by a link of that rate."""
    names = [f"bench-copies-{os.getpid()}-{number}" for number in (0, 1)]
    try:
        for name in names:
            tool("ip", "netns", "add", name)
        tool("ip", "link", "add", "c0", "netns", names[0], "type", "veth", "peer", "name", "c0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            tool("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "c0")
            tool("ip", "-n", name, "link", "set", "lo", "up")
            tool("ip", "-n", name, "link", "set", "c0", "up")
            tool(
                "tc", "-n", name, "qdisc", "add", "dev", "c0", *f"root tbf rate {rate} burst 512kb latency 50ms".split()
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=60)


def train(
    folder: Path,
    names: list[str],
    size: int,
    seconds: float,
    copies: dict[str, Any],
    flush: bool,
    *,
    huge: bool = False,
    writers: int = 1,
) -> dict[str, Any]:
    """Run the agents to the end. Returns the figures of the rank on rank 0's node. ``huge``: RAM with huge pages."""
    run, token = f"bench-{secrets.token_hex(4)}", secrets.token_hex(16)
    count = len(names) or 1
    started = []
    link = {"host": ADDRESSES[0], "port": LINK, "token": token, "nodes": [f"n{rank}" for rank in range(count)]}
    for rank in range(count):
        home = folder / f"{run}-{rank}"
        home.mkdir()
        target = "{output}" if copies.get("memory") else "out"
        addresses = [ADDRESSES[rank], ADDRESSES[1 - rank]] if names else ["", ""]
        argv = [sys.executable, "-c", RANK, target, str(size), str(seconds), str(int(flush)), str(writers)]
        env = {
            "RANK": str(rank),
            "ADDRESSES": json.dumps(addresses),
            "PORT": str(EXCHANGE),
            "WARM": str(WARM if names else 0),
        }
        plan = {
            "version": 2, "run": run, "node": f"n{rank}", "node_rank": rank, "nnodes": count, "argv": argv, "env": env,
            "cwd": ".", "logs": "logs", "first_rank": rank, "link": link if names else None, "copies": copies,
            "resume": {"output": "out", "argv": [], "env": {}, "known": True},
        }  # fmt: skip
        (home / "plan.json").write_text(json.dumps(plan))
        enter = ["ip", "netns", "exec", names[rank]] if names else []
        enter += ["unshare", "--mount", "sh", "-c", HUGE, "sh"] if huge else []
        command = [*enter, sys.executable, "-IB", str(AGENT), "run", str(home / "plan.json")]
        started.append((home, subprocess.Popen(command, stdout=subprocess.DEVNULL)))
    try:
        for _, agent in started:
            agent.wait(seconds * 4 + PATIENCE)
    finally:
        for _, agent in started:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(60)
    home = started[0][0]
    if not (home / "result.json").exists():
        raise SystemExit(f"the run failed: {(home / 'logs/events.jsonl').read_text()[-2000:]}")
    figures: dict[str, Any] = json.loads((home / "result.json").read_text())
    for other, _ in started:
        shutil.rmtree(other)
    return figures


def slowdown(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """How much longer steps are while copies are made."""
    size = int(given.gigabytes * 5e8)  # each node's half
    means: dict[int, list[float]] = {0: [], 1: []}
    speeds: dict[int, list[float]] = {0: [], 1: []}
    with namespaces(given.rate) as names:
        for number in range(given.runs):
            for peers in ((0, 1), (1, 0))[number % 2]:  # each is first in turn: the machine's load changes
                found = train(folder, names, size, given.seconds, {"peers": peers}, False)
                means[peers].append(statistics.mean(found["steps"]))
                speeds[peers].append(found["other_bytes"] / sum(found["steps"]) / 1e6)
    without, with_ = (statistics.median(means[peers]) for peers in (0, 1))
    return {
        "figure": "slowdown by copies", "percent": round(100 * (with_ / without - 1), 2),
        "each_ms": {str(peers): [round(1000 * one, 1) for one in each] for peers, each in means.items()},
        "copied_mb_per_s": round(statistics.median(speeds[1]) - statistics.median(speeds[0]), 2),
    }  # fmt: skip


def memory(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """How long a save stops the training, with memory and with the disk."""
    ways: dict[str, dict[str, Any]] = {
        "disk, flushed": {"copies": {"peers": 0}, "flush": True},
        "disk": {"copies": {"peers": 0}, "flush": False},
        "memory": {"copies": {"peers": 0, "memory": True}, "flush": True},
        "memory, huge pages": {"copies": {"peers": 0, "memory": True}, "flush": True, "huge": True},
    }
    size = int(given.gigabytes * 1e9)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.runs):
        for name, way in ways.items():
            found[name].append(train(folder, [], size, 1, writers=given.writers, **way)["saved"])
    medians = {name: round(statistics.median(each), 3) for name, each in found.items()}
    against = {
        name: {disk: round(medians[name] / medians[disk], 3) for disk in ("disk, flushed", "disk")}
        for name in ("memory", "memory, huge pages")
    }
    figure = "time a save stops training"
    return {"figure": figure, "writers": given.writers, "seconds": medians, "each": found, "against": against}


def main() -> None:
    """Measure, and print a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the whole checkpoint")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training after a save")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it")
    parser.add_argument("--writers", type=int, default=1, help="processes of a node that write a part each")
    parser.add_argument("--only", default="slowdown,memory")
    parser.add_argument("--work", default="/var/tmp", help="a folder on a disk")
    given = parser.parse_args()
    measures = {"slowdown": slowdown, "memory": memory}
    with tempfile.TemporaryDirectory(dir=given.work) as folder:
        print(json.dumps({"load": os.getloadavg(), "cores": os.cpu_count(), "time": time.strftime("%F")}), flush=True)
        for name in given.only.split(","):
            print(json.dumps(measures[name](Path(folder), given)), flush=True)


if __name__ == "__main__":
    main()
