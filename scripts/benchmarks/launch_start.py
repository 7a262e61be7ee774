"""Seconds until a run trains on all nodes, beside bare torchrun; of the gate; until a killed run has ended."""

import re
import shlex
import signal
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench_measure import BenchError, progress
from bench_table import Measured, Outcome
from launch_cluster import PLAIN, TINY, Cluster, Run
from launch_proc import only, strike

FIRST = r"first line at ([\d.]+)"
STAGES = {
    "prepared": r"^Preparing nodes: done",
    "asked": r"^Looking for what would stop the run \.\.\.",
    "passed": r"^Looking for what would stop the run: done",
}
# torchrun's options that only redirect its output into the run's folder.
OURS = ("--log-dir", "--redirects")
GONE = 60.0


def start(cluster: Cluster, repeats: int) -> dict[str, Outcome]:
    """``start`` and ``gate``: ours, then the same command in the same environment by ssh, in turn."""
    ours: list[float] = []
    peer: list[float] = []
    starts: list[float] = []
    gates: list[float] = []
    prepared: list[float] = []
    for node in cluster.names:  # both sides start with open connections
        if cluster.ssh(node, "true").finish():
            raise BenchError(f"{node} cannot be reached by ssh")
    for number in range(1, repeats + 1):
        with progress(f"start: ours, {number} of {repeats}") as report:
            started = time.time()
            run = cluster.train(PLAIN)
            if run.lines.finish():
                raise BenchError(f"train failed: {run.lines.text[-600:]}")
            at = {name: run.lines.until(pattern)[0] for name, pattern in STAGES.items()}
            ours.append(max(_firsts(run).values()) - at["passed"])
            starts.append(max(_torchrun_started(run, node) for node in run.names) - at["passed"])
            gates.append(at["passed"] - at["asked"])
            prepared.append(at["prepared"] - started)
            report(f"{ours[-1]:.2f} s from the gate to the first line everywhere; gate {gates[-1]:.2f} s")
        with progress(f"start: bare torchrun, {number} of {repeats}") as report:
            peer.append(_bare(cluster, run))
            report(f"{peer[-1]:.2f} s")
    raw = {"ours": ours, "peer": peer, "torchrun_started": starts, "gate": gates, "before": prepared}
    note = (
        f"runs {_walls(ours)} and {_walls(peer)} s; of ours {_walls(starts)} s until torchrun was started on the last "
        "node; the peer gets the same command and environment through ssh "
        "connections that are open already"
    )
    before = (
        f"runs {_walls(gates)} s; before it the command starts, connects and sends the run's folder: "
        f"{_walls(prepared)} s"
    )
    return {
        "start": Measured(statistics.median(ours), statistics.median(peer), note, raw),
        "gate": Measured(statistics.median(gates), None, before, raw),
    }


def _torchrun_started(run: Run, node: str) -> float:
    return float(next(event["time"] for event in run.events(node) if event["event"] == "started"))


def _firsts(run: Run) -> Mapping[str, float]:
    """By node, when its rank ran its first line."""
    found = {}
    for node in run.names:
        lines = [str(event["line"]) for event in run.events(node) if event["event"] == "log"]
        times = [float(match[1]) for line in lines if (match := re.search(FIRST, line))]
        if not times:
            raise BenchError(f"no first line on {node}")
        found[node] = max(times)
    return found


def bare(plan: Mapping[str, Any], port: int, *more: str) -> str:
    """A node's plan as a line for sh, as a user without an agent would type it."""
    argv = [str(port) if word == "{port}" else str(word) for word in plan["argv"]]
    for name in OURS:
        if name in argv:
            del argv[argv.index(name) : argv.index(name) + 2]
    unset = (f"-u{name}" for name in plan.get("unset") or () if "*" not in name)
    env = (f"{name}={value}" for name, value in {**plan["env"], "MASTER_PORT": str(port)}.items())
    return f"cd {shlex.quote(plan['cwd'])} && exec env {shlex.join([*unset, *env, *argv, *more])}"


def _bare(cluster: Cluster, run: Run) -> float:
    """Seconds from the first ssh until the last node has run its first line."""
    plans = run.record()["plans"]
    scripts = {node: bare(plans[node], 29000) for node in run.names}
    started = time.time()
    all_of_them = [cluster.ssh(node, script) for node, script in scripts.items()]
    firsts = [float(each.until(FIRST)[1][1]) for each in all_of_them]
    if failed := [each.text[-300:] for each in all_of_them if each.finish()]:
        raise BenchError(f"bare torchrun failed: {failed[0]}")
    return max(firsts) - started


def kill(cluster: Cluster, repeats: int) -> dict[str, Outcome]:
    """``kill`` and ``kill-alone``: a rank is killed, with clusterctl running and without."""
    found: dict[str, list[float]] = {"kill": [], "kill-alone": []}
    for number in range(1, repeats + 1):
        for name, took in found.items():
            with progress(f"{name}: {number} of {repeats}") as report:
                run = cluster.train(TINY, "--", "--steps", "100000")
                run.lines.until(r"step 3 ")
                processes = run.processes()
                victim = cluster.names[len(cluster.names) // 2]
                if name == "kill-alone":
                    run.lines.end()
                strike(only(processes, "rank", victim)[:1], signal.SIGKILL)
                seconds, left = run.over(GONE)
                if left:
                    raise BenchError(f"{len(left)} processes are left: {left[0].node}: {left[0].command}")
                took.append(seconds)
                status = run.lines.finish()
                report(f"{seconds:.2f} s until {len(processes)} processes were gone, exit status {status}")
    return {
        name: Measured(
            statistics.median(took),
            None,
            f"runs {_walls(took)} s, until no process of the run was left, agents included",
            {"runs": took},
        )
        for name, took in found.items()
    }


def _walls(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
