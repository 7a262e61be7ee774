"""A crash from which a run recovers, a stopped rank, and the cost of the agent, on two nodes."""

import re
import signal
import statistics
import time
from dataclasses import asdict
from itertools import cycle

from bench_measure import BenchError, progress
from bench_table import Measured, Outcome
from launch_cluster import TINY, Cluster, Run
from launch_proc import Kind, cost, only, strike
from launch_start import bare

NODES = 2
KILLED_AT = 12  # step
SAVE_EVERY = 5
LAST = 24
RESTARTING = ("--restarts", "1", "--output", "out", "--resume-arg", "--resume={checkpoint}")
SCRIPT = (TINY, "--", "--steps", str(LAST), "--output", "out", "--save-every", str(SAVE_EVERY))
VICTIMS: tuple[tuple[Kind, int], ...] = (("rank", 1), ("launcher", 1), ("rank", 0), ("launcher", 0))
STEP = re.compile(r"step (\d+) loss")


def restart(cluster: Cluster, times: int, repeats: int) -> dict[str, Outcome]:
    """``restart`` and ``recover``: seconds from a kill to the next step, ``times`` times."""
    seconds: list[float] = []
    parts: list[dict[str, float]] = []
    peer: list[float] = []
    why: list[str] = []
    for number, (kind, rank) in zip(range(1, times + 1), cycle(VICTIMS), strict=False):
        with progress(f"restart: {kind} of node {rank + 1}, {number} of {times}") as report:
            run = cluster.train(*RESTARTING, *SCRIPT, nodes=NODES)
            run.lines.until(rf"step {KILLED_AT} ")
            victim = only(run.processes(), kind, run.names[rank])[:1]
            struck = time.time()
            strike(victim)
            try:
                seconds.append(_again(run, struck))
                parts.append(_parts(run, struck))
                report(f"{seconds[-1]:.2f} s until the next step")
            except BenchError as error:
                why.append(str(error))
                report(f"not recovered: {error}")
        if seconds and len(peer) < repeats and number > len(peer) * times / repeats:  # spread over the time it takes
            with progress(
                f"restart: bare torchrun resumes from the checkpoint, {len(peer) + 1} of {repeats}"
            ) as report:
                peer.append(_bare(cluster, run))
                report(f"{peer[-1]:.2f} s until the first step")
    if not seconds:
        raise BenchError(f"no restart recovered: {why[0]}")
    raw = {"ours": seconds, "parts": parts, "peer": peer, "not_recovered": why}
    ended, waited = (statistics.median(each[name] for each in parts) for name in ("ended", "restarted"))
    note = (
        f"{NODES} nodes; {len(seconds)} restarts, from {min(seconds):.2f} to {max(seconds):.2f} s: after "
        f"{ended:.2f} s all had ended, after {waited:.2f} s torchrun was started again; the peer is bare "
        f"torchrun on both nodes from the same checkpoint to its first step, {_walls(peer)} s"
    )
    recovered = "; ".join(why) or f"of {times}: a rank or torchrun killed, on either node"
    return {
        "restart": Measured(statistics.median(seconds), statistics.median(peer), note, raw),
        "recover": Measured(len(seconds) / times, None, f"{len(seconds)} {recovered}", raw),
    }


def _again(run: Run, struck: float) -> float:
    """Seconds from the crash until the second attempt has taken a step, once the run has finished.

    Raises:
        BenchError: it has not finished, or it started at the first step again.
    """
    status = run.lines.finish()
    _, left = run.over(10)
    if status or left:
        raise BenchError(f"exit status {status}, {len(left)} processes left: {run.lines.text[-500:]}")
    events = [event for event in run.events(run.names[0]) if event["event"] == "log" and event["attempt"] == 2]
    steps = [(event["time"], int(found[1])) for event in events if (found := STEP.search(event["line"]))]
    if not steps or steps[0][1] < KILLED_AT - SAVE_EVERY or steps[-1][1] != LAST:
        raise BenchError(f"steps {[step for _, step in steps]} after the crash")
    return float(steps[0][0]) - struck


def _parts(run: Run, struck: float) -> dict[str, float]:
    """Seconds from the crash until the first attempt had ended on both nodes, and until torchrun was started again."""
    events = [event for node in run.names for event in run.events(node)]
    return {
        "ended": max(event["time"] for event in events if event["event"] == "exit" and event["attempt"] == 1) - struck,
        "restarted": max(event["time"] for event in events if event["event"] == "started") - struck,
    }


def _bare(cluster: Cluster, run: Run) -> float:
    plans = run.record()["plans"]
    resumed_at = [event["checkpoint"] for event in run.events(run.names[0]) if event["event"] == "attempt"][-1]
    more = ("--resume", f"out/{resumed_at}")
    started = time.time()
    both = [cluster.ssh(node, bare(plans[node], 29000, *more)) for node in run.names]
    first = both[0].until(STEP.pattern)[0] - started
    if failed := [each.text[-300:] for each in both if each.finish()]:
        raise BenchError(f"bare torchrun failed: {failed[0]}")
    return first


def _walls(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def hang(cluster: Cluster, repeats: int) -> dict[str, Outcome]:
    """``hang``: a rank is stopped; seconds until an agent names it and the run ends."""
    took: list[float] = []
    for number in range(1, repeats + 1):
        with progress(f"hang: SIGSTOP, {number} of {repeats}") as report:
            run = cluster.train(TINY, "--", "--steps", "100000", nodes=NODES)
            run.lines.until(r"step 3 ")
            victim = only(run.processes(), "rank", run.names[1])[:1]
            struck = time.time()
            strike(victim, signal.SIGSTOP)
            status = run.lines.finish()
            events = [event for event in run.events(run.names[1]) if event["event"] == "hang"]
            if not events or events[0]["rank"] != 1 or "rank 1" not in run.lines.text:
                raise BenchError(f"rank 1 is not named: {run.lines.text[-500:]}")
            took.append(events[0]["time"] - struck)
            report(f"{took[-1]:.2f} s, exit status {status}: {events[0]['text']}")
    note = f"{NODES} nodes; runs {_walls(took)} s"
    return {"hang": Measured(statistics.median(took), None, note, {"runs": took})}


def overhead(cluster: Cluster, seconds: float) -> dict[str, Outcome]:
    """``cpu`` and ``rss``: guard and supervisor together, on the node with the higher figure."""
    run = cluster.train(TINY, "--", "--steps", "100000", nodes=NODES)
    with progress(f"cost: {seconds:g} s of training"):
        run.lines.until(r"step 30 ")
        agents = {node: [each.pid for each in only(run.processes(), "agent", node)] for node in run.names}
        if any(len(pids) != 2 for pids in agents.values()):
            raise BenchError(f"not two processes of an agent on every node: {agents}")
        before = {node: [cost(pid) for pid in pids] for node, pids in agents.items()}
        started = time.perf_counter()
        time.sleep(seconds)  # the measured time
        took = time.perf_counter() - started
        after = {node: [cost(pid) for pid in pids] for node, pids in agents.items()}
    cluster.finished("stop", run.id)
    _, left = run.over(10)
    if left:
        raise BenchError(f"{len(left)} processes are left after a stop")
    cpu = {
        node: 100 * (sum(each.cpu for each in after[node]) - sum(each.cpu for each in before[node])) / took
        for node in run.names
    }
    rss, pss = (
        {node: sum(getattr(each, kind) for each in after[node]) for node in run.names} for kind in ("rss", "pss")
    )
    raw = {
        node: {"before": [asdict(each) for each in before[node]], "after": [asdict(each) for each in after[node]]}
        for node in run.names
    }
    shares = ", ".join(f"{node} {value:.2f} %" for node, value in cpu.items())
    return {
        "cpu": Measured(
            round(max(cpu.values()), 2), None, f"over {took:.0f} s, ten steps a second, {NODES} nodes: {shares}", raw
        ),
        "rss": Measured(
            max(rss.values()),
            None,
            f"what both share counts twice; once: {max(pss.values()) / 1e6:.1f} MB",
            raw,
        ),
    }
