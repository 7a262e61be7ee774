"""Slows one of three ranks in five ways, and measures when the agent names it: ``docs/benchmarks.md``.

    scripts/benchmarks/stragglers.py --env FOLDER [--faults data,quota,disk,link,core] [--round 20]

Root, sandbox nodes and an environment with torch: real DistributedDataParallel over gloo and real links. Each fault
makes a step some 10 to 20 % longer. Prints a line of JSON for each: the named rank and cause, and after how long.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch_cluster
from bench_measure import BenchError

SLOW = 1  # the rank
HEALTHY = 7  # rounds before the first fault
NAMED = 12  # rounds in which a fault must be named
CONSISTENT = 5  # rounds that name a rank
STEP = 0.2  # seconds
BATCH = "/var/tmp/batch"  # on every node
TRAINER = Path(__file__).resolve().parents[2] / "tests/nodes/trainers/uneven.py"
CPU, BLKIO = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/blkio")  # v1, as on Debian in a container


class Nodes(launch_cluster.Cluster):
    """The nodes, and what the run on them has printed."""

    lines: launch_cluster.Lines


def rank_pid(run: str, rank: int) -> int:
    """The process of a rank: nodes are namespaces, but not of processes.

    Raises:
        BenchError: there is none.
    """
    wanted = {f"CLUSTERCTL_RUN={run}".encode(), f"RANK={rank}".encode()}
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                found.append(int(path.name))
    if not found:
        raise BenchError(f"no process of rank {rank}")
    return min(found)


def used(pid: int) -> float:
    """Seconds of a processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def group(root: Path, pid: int, **settings: str) -> Iterator[None]:
    """A cgroup with a process in it."""
    folder = root / "clusterctl-straggler"
    folder.mkdir()
    try:
        for name, value in settings.items():
            (folder / name.replace("__", ".")).write_text(value)
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


def pace(cluster: Nodes) -> float:
    """Seconds of a step now: the machine's load changes them."""
    lines = cluster.lines.text.count("\nstep ")
    time.sleep(10)  # the measured time itself
    return 10 / max(1, cluster.lines.text.count("\nstep ") - lines)


@contextlib.contextmanager
def quota(cluster: Nodes, pid: int) -> Iterator[None]:
    """Less of a processor than the rank needs."""
    del cluster
    before, began = used(pid), time.monotonic()
    time.sleep(5)  # the measured time itself
    share = (used(pid) - before) / (time.monotonic() - began)
    with group(CPU, pid, cpu__cfs_quota_us=str(max(1000, int(85_000 * share)))):
        yield


@contextlib.contextmanager
def disk(cluster: Nodes, pid: int) -> Iterator[None]:
    """A disk that reads a batch in 1.15 times the time of a step."""
    device = cluster.folder.stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {int((256 << 10) / (1.15 * pace(cluster)))}"
    with group(BLKIO, pid, blkio__throttle__read_bps_device=limit):
        yield


@contextlib.contextmanager
def data(cluster: Nodes, pid: int) -> Iterator[None]:
    """A data loader that sleeps."""
    del pid
    node = cluster.names[SLOW]
    cluster.ssh(node, f"echo {0.15 * pace(cluster):.4f} >/run/slow-{SLOW}").finish()
    try:
        yield
    finally:
        cluster.ssh(node, f"rm /run/slow-{SLOW}").finish()


@contextlib.contextmanager
def link(cluster: Nodes, pid: int) -> Iterator[None]:
    """A link that sends no more than 60 Mbit/s."""
    del pid
    node = cluster.names[SLOW]
    shape = "for each in $(ls /sys/class/net | grep -v lo); do tc qdisc %s dev $each root %s || exit 1; done"
    if cluster.ssh(node, shape % ("replace", "tbf rate 60mbit burst 64kb latency 400ms")).finish():
        raise BenchError("tc failed")
    try:
        yield
    finally:
        cluster.ssh(node, shape % ("del", "")).finish()


@contextlib.contextmanager
def core(cluster: Nodes, pid: int) -> Iterator[None]:
    """A busy process on the processor that the rank is bound to."""
    del cluster
    cores = os.sched_getaffinity(pid)
    chosen = {max(cores)}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        os.sched_setaffinity(int(task.name), chosen)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, chosen)
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
        for task in Path(f"/proc/{pid}/task").glob("*"):
            os.sched_setaffinity(int(task.name), cores)


FAULTS = {each.__name__: each for each in (data, quota, disk, link, core)}
EXPECTED = {"data": "data", "quota": "cpu", "disk": "disk", "link": "link", "core": "cpu"}


def measure(cluster: Nodes, faults: list[str], round_: float, keep: Path | None) -> Iterator[dict[str, Any]]:
    """Train with each fault in turn."""
    for node in cluster.names:
        cluster.ssh(node, f"head -c {256 << 10} /dev/urandom >{BATCH}").finish()
    words = ["--steps", "100000", "--step", str(STEP), "--width", "2048", "--faults", "/run", "--read", BATCH]
    run = cluster.train(
        "--env", f"CLUSTERCTL_STRAGGLER_ROUND={round_}", f"{launch_cluster.CODE}/{TRAINER.name}", "--", *words
    )
    run.lines.until(r"^step 20/")
    cluster.lines = run.lines
    time.sleep(HEALTHY * round_)
    early = stragglers(run)
    yield {"healthy_seconds": HEALTHY * round_, "false_alarms": len(early), "events": early}
    for name in faults:
        pid = rank_pid(run.id, SLOW)
        with FAULTS[name](cluster, pid):
            began = time.time()
            found = None
            while found is None and time.time() < began + NAMED * round_:
                time.sleep(0.5)  # only the node's file shows it
                found = next(
                    (each for each in stragglers(run) if each["time"] > began and each["state"] == "slow"), None
                )
        time.sleep((CONSISTENT + 1) * round_)  # healthy rounds, so that none of the last fault counts for the next
        right = found is not None and (found["rank"], found["kind"]) == (SLOW, EXPECTED[name])
        seconds = None if found is None else round(found["time"] - began, 1)
        yield {"fault": name, "right": right, "seconds": seconds, "text": found and found["text"]}
    cluster.finished("stop", run.id)
    if keep:
        folder = cluster.box.node_root(cluster.names[0]) / str(run.record()["folder"]).lstrip("/")
        shutil.copy(folder / "logs/node0/rounds.jsonl", keep)


def stragglers(run: launch_cluster.Run) -> list[dict[str, Any]]:
    """The events about stragglers so far."""
    return [event for event in run.events(run.names[0]) if event["event"] == "straggler"]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", type=Path, required=True, help="an environment with torch")
    parser.add_argument("--clusterctl", type=Path, default=Path(sys.executable).with_name("clusterctl"))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--round", type=float, default=20.0, help="seconds of a round")
    parser.add_argument("--keep", type=Path, help="a file for the rounds, to be read")
    given = parser.parse_args()
    launch_cluster.TRAINERS = (*launch_cluster.TRAINERS, TRAINER)
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,  # a real disk
        Nodes(given.clusterctl, Path(folder, "c"), given.env, 3) as cluster,
    ):
        for found in measure(cluster, given.faults.split(","), given.round, given.keep):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
