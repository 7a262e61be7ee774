"""Ends runs in every way, one after the other, and looks for processes that are left."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import cycle

from bench_measure import BenchError, progress
from bench_table import Measured, Outcome
from launch_cluster import PLAIN, Cluster, Run
from launch_proc import Process, only, strike

NODES = 2
STOPPED = 1.0  # seconds after `clusterctl stop` has returned: sshd takes down its sessions
ENDED = 30.0  # seconds after something was killed, on a machine that starts other things meanwhile

Way = Callable[
    [Run, Sequence[Process]], float
]  # ends a run; returns the seconds until all its processes must have exited


def _stop(run: Run, _: Sequence[Process]) -> float:
    run.cluster.finished("stop", run.id)
    return STOPPED


def _interrupt(run: Run, _: Sequence[Process]) -> float:
    run.lines.process.send_signal(signal.SIGINT)
    run.lines.finish()
    return STOPPED


def _detach(run: Run, found: Sequence[Process]) -> float:
    run.lines.process.send_signal(signal.SIGTERM)
    run.lines.finish()
    return _stop(run, found)


def _kill_cli(run: Run, found: Sequence[Process]) -> float:
    os.kill(run.lines.process.pid, signal.SIGKILL)
    return _stop(run, found)


def _guard(run: Run, found: Sequence[Process]) -> float:
    strike(only(found, "agent", run.names[1])[:1])
    return ENDED


def _supervisor(run: Run, found: Sequence[Process]) -> float:
    strike(only(found, "agent", run.names[1])[1:])
    return ENDED


def _agent(run: Run, found: Sequence[Process]) -> float:
    """No process on that node is left to clean up; ``clusterctl stop`` does it."""
    strike(only(found, "agent", run.names[1]))
    run.lines.finish()
    return _stop(run, found)


def _torchrun(run: Run, found: Sequence[Process]) -> float:
    strike(only(found, "launcher", run.names[0])[:1])
    return ENDED


def _rank(run: Run, found: Sequence[Process]) -> float:
    strike(only(found, "rank", run.names[1])[:1])
    return ENDED


def _cli_and_torchrun(run: Run, found: Sequence[Process]) -> float:
    os.kill(run.lines.process.pid, signal.SIGKILL)
    strike(only(found, "launcher", run.names[1])[:1])
    return ENDED


WAYS: dict[str, Way] = {
    "clusterctl stop": _stop,
    "Ctrl-C": _interrupt,
    "SIGTERM to the command, then stop": _detach,
    "kill -9 of the command, then stop": _kill_cli,
    "kill -9 of the guard": _guard,
    "kill -9 of the supervisor": _supervisor,
    "kill -9 of both, then stop": _agent,
    "kill -9 of torchrun": _torchrun,
    "kill -9 of a rank": _rank,
    "kill -9 of the command and torchrun": _cli_and_torchrun,
}


def stops(cluster: Cluster, times: int) -> dict[str, Outcome]:
    """``stops``: every second one hits a run that trains, the others one whose torchrun has just been started."""
    left: list[str] = []
    seconds: list[float] = []
    for number, (name, way) in zip(range(1, times + 1), cycle(WAYS.items()), strict=False):
        early = (number - 1) // len(WAYS) % 2 == 1 and way is not _rank
        moment = "at the start" if early else "while it trains"
        with progress(f"stops: {number} of {times}, {name} {moment}") as report:
            run = cluster.train(PLAIN, "--", "100000", nodes=NODES)
            found = run.processes_until("launcher" if early else "rank", run.names)
            if not early:
                run.lines.until("step 3 ")
                found = run.processes()
            started = time.perf_counter()
            patience = way(run, found)
            took, rest = run.over(patience)
            seconds.append(time.perf_counter() - started)
            if rest:
                left += [f"{number}, {name} {moment}: {each.node}: {each.command[:120]}" for each in rest]
                strike(rest)
                _, rest = run.over(ENDED)
                if rest:
                    raise BenchError(f"cannot be killed: {rest[0].command}")
                report(f"left behind: {left[-1]}")
            else:
                report(f"{took:.2f} s" if patience == ENDED else f"nothing left, {seconds[-1]:.1f} s")
            run.lines.end()
    bad = len({each.partition(",")[0] for each in left})
    note = f"{times} stops in {len(WAYS)} ways on {NODES} nodes, with a trainer without torch under real torchrun; " + (
        "left behind: " + "; ".join(left) if left else f"the slowest took {max(seconds):.1f} s"
    )
    return {"stops": Measured(bad, None, note, {"left": left, "seconds": seconds, "ways": list(WAYS)})}
