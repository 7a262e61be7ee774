#!/usr/bin/env python3
"""scripts/bench monitor: the CPU that ``clusterctl monitor --every 1`` uses, here and on the nodes it watches.

Sandbox nodes with this machine's Python have the files of a run with 8 GPUs each, as agents write them: every second a
log line of each rank, a step on rank 0's node, and a sample, which agents take only every 10 s. The monitor runs in a
terminal of 200 x 60 and talks to all nodes over ssh. The figures are its own CPU time, and that of all processes of a
node together, as shares of one core. Needs root.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import pty
import random
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from provision import sandbox
from provision.inventory import load

RUN = "20261123-101500-sft-1a2b"
COMMAND = "from provision.cli import main; main()"
GIB = 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")
GPUS = 8
ROWS, COLUMNS = 60, 200
WARM_UP = 300.0  # seconds in which the monitor connects and reads what exists
SETTLED = 5.0  # seconds without a node that starts something
STARTS = 0.05  # seconds of CPU that a node needs at least for the connection and the start of its program


class Node:
    """The folder of a node of the run."""

    def __init__(self, box: sandbox.Sandbox, root: Path, name: str, rank: int, count: int) -> None:
        self.name, self.rank = name, rank
        self.folder = box.node_root(name) / str(root).lstrip("/") / "runs" / RUN / "logs" / f"node{rank}"
        self.folder.mkdir(parents=True)
        stat = box.enter(name, ["cat", "/proc/1/stat"]).stdout.rpartition(")")[2].split()
        state = {
            "run": RUN, "node": name, "node_rank": rank, "nnodes": count, "state": "running", "phase": "training",
            "step": 1, "total": 100_000, "attempt": 1, "attempts": 1, "began": time.time(), "pid": 1, "start": stat[19],
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        }  # fmt: skip
        (self.folder / "state.json").write_text(json.dumps(state))

    def add(self, step: int) -> None:
        """Write what an agent writes in a second."""
        now = time.time()
        if self.rank == 0:
            event = {"event": "progress", "time": now, "step": step, "loss": 1 + 9 / step, "tokens_per_second": 1e5}
            self._append("events.jsonl", json.dumps(event))
        gpus = [
            {"index": index, "use": random.randint(80, 100), "memory": 60 * GIB, "memory_total": 80 * GIB,
             "power": random.uniform(400, 700), "temperature": random.randint(50, 70)}
            for index in range(GPUS)
        ]  # fmt: skip
        rates = {"eth0": {"in": random.randint(0, 10**6), "out": random.randint(0, 10**6)}}
        sample = {"time": now, "rss": 16 * GIB, "load": 8.0, "disk_free": 10**12, "gpus": gpus, "network": rates}
        self._append("metrics.jsonl", json.dumps(sample))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(now))
        lines = [f"{stamp} [{GPUS * self.rank + local}] step {step} loss {1 + 9 / step:.4f}" for local in range(GPUS)]
        self._append("run.log", "\n".join(lines))

    def _append(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text + "\n")


def feed(nodes: Sequence[Node]) -> None:
    """Write for all nodes, every second."""
    step = 300
    while True:
        began = time.monotonic()
        step += 1
        for node in nodes:
            node.add(step)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


def used(pid: int, *, children: bool = False) -> float:
    """Seconds of CPU of a process, and of its ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / TICKS


def used_exactly(process: Path) -> float:
    """Seconds of CPU of a process's threads and its ended children: a tick is too long for small shares."""
    try:
        children = sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[13:15])) / TICKS
        threads = [(task / "schedstat").read_text().split()[0] for task in (process / "task").iterdir()]
    except OSError:
        return 0.0
    return children + sum(map(int, threads)) / 1e9


def used_by_nodes(box: sandbox.Sandbox) -> dict[str, float]:
    """Seconds of CPU of all processes of each node."""
    spaces = {Path(f"/proc/{box.init_process(node.name).pid}/ns/mnt").readlink(): node.name for node in box.nodes}
    found = dict.fromkeys(spaces.values(), 0.0)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = spaces.get((process / "ns/mnt").readlink())
        except OSError:
            continue
        if name:
            found[name] += used_exactly(process)
    return found


def watch(folder: Path, inventory: Path, seconds: float, box: sandbox.Sandbox) -> tuple[float, list[float], float]:
    """The shares of a core that the monitor and each node use, and the seconds between two steps on the screen."""
    argv = [sys.executable, "-c", COMMAND, "monitor", "-i", str(inventory), RUN, "--every", "1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TERM"] = "xterm-256color"
        os.execv(argv[0], argv)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shown = bytearray()
    try:
        _warm_up(terminal, shown, box)
        before, on_nodes, began = used(pid), used_by_nodes(box), time.monotonic()
        start = len(shown)
        _drain(terminal, seconds, shown)
        span = time.monotonic() - began
        mine = (used(pid) - before) / span
        after = used_by_nodes(box)
        steps = set(re.findall(rb"step (\d+)/", shown[start:]))
    finally:
        os.kill(pid, signal.SIGTERM)
        _drain(terminal, 2.0, shown)
        os.close(terminal)
        os.waitpid(pid, 0)
    missing = [node.name for node in box.nodes if node.name.encode() not in shown]
    if missing:
        raise SystemExit(f"the screen did not show {len(missing)} nodes: {bytes(shown[-2000:])!r}")
    if len(steps) < 2:
        raise SystemExit(f"the screen showed {len(steps)} steps in {seconds:g} s: {bytes(shown[-2000:])!r}")
    return mine, [(after[name] - on_nodes[name]) / span for name in after], span / len(steps)


def _warm_up(terminal: int, shown: bytearray, box: sandbox.Sandbox) -> None:
    """Wait until every node has started its program and needs little."""
    until, first = time.monotonic() + WARM_UP, used_by_nodes(box)
    before = first
    while time.monotonic() < until:
        _drain(terminal, SETTLED, shown)
        after = used_by_nodes(box)
        if all(after[name] - first[name] > STARTS > after[name] - before[name] for name in after):
            return
        before = after
    raise SystemExit(f"some nodes were still starting after {WARM_UP:g} s")


def _drain(terminal: int, seconds: float, shown: bytearray) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the monitor has ended
                return


def main() -> int:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="scripts/bench monitor", description=__doc__)
    parser.add_argument("--nodes", type=int, default=64, metavar="N")
    parser.add_argument("--seconds", type=float, default=30, metavar="S", help="of the measurement")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = sandbox.Options(
            nodes=given.nodes, rootfs="host", name=f"bench-m-{os.getpid()}", directory=folder / "box"
        )
        with sandbox.up(options) as box:
            root = Path(load(box.inventory).root)
            nodes = [Node(box, root, node.name, rank, given.nodes) for rank, node in enumerate(box.nodes)]
            for step in range(1, 301):
                nodes[0].add(step)
            feeder = multiprocessing.Process(target=feed, args=(nodes,), daemon=True)
            feeder.start()
            try:
                mine, theirs, every = watch(folder, box.inventory, given.seconds, box)
            finally:
                feeder.terminate()
    print(f"{given.nodes} nodes x {GPUS} GPUs, every second, {given.seconds:g} s, load {os.getloadavg()[0]:.1f}")
    print(f"the screen shows a new step every {every:.1f} s")
    print(f"monitor: {100 * mine:.1f} % of a core (must 30, aim 10)")
    print(f"a node: {100 * median(theirs):.2f} % of a core, at most {100 * max(theirs):.2f} (must 1, aim 0.3)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
