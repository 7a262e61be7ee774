"""The processes of a run on all nodes, as this machine sees them: the nodes are namespaces of it.

A run's processes carry its mark in their environment; its agents, and the commands that clusterctl started on the
nodes, have its folder in their command line. Both show what a process does.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench_measure import BenchError

Kind = Literal["agent", "launcher", "rank", "other"]

LOOK = 0.05  # seconds between two samples: the kernel has no event for the exit of a process that is not a child
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process; ``node`` is empty if unknown."""

    pid: int
    node: str
    kind: Kind
    command: str


def classified(pid: int, environ: bytes, cmdline: bytes, run: str, names: Sequence[str]) -> Process | None:
    """A process of ``run``, from its entries in /proc; None if it belongs to no run or another one.

    ``names`` are the nodes in the order of their ranks: an agent's plan is called after its rank.
    """
    command = cmdline.replace(b"\0", b" ").decode(errors="replace").strip()
    known = dict(word.split("=", 1) for word in environ.decode(errors="replace").split("\0") if "=" in word)
    if known.get("CLUSTERCTL_RUN") == run:
        kind: Kind = "rank" if "LOCAL_RANK" in known else "launcher" if "torch.distributed.run" in command else "other"
        return Process(pid, known.get("CLUSTERCTL_NODE", ""), kind, command)
    if run not in command:
        return None
    plan = re.search(r"/plan-(\d+)\.json", command)
    node = names[int(plan[1])] if plan else ""
    agent = re.search(r"/agent (start|daemon) ", command)
    return Process(pid, node, "agent" if agent else "other", command)


def of_run(run: str, names: Sequence[str]) -> list[Process]:
    """All processes of a run, the oldest first."""
    found = []
    for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
        with suppress(OSError):  # it has exited
            environ, cmdline = (Path(f"/proc/{pid}/{file}").read_bytes() for file in ("environ", "cmdline"))
            if each := classified(pid, environ, cmdline, run, names):
                found.append((int(_fields(pid)[19]), pid, each))
    return [each for _, _, each in sorted(found, key=lambda one: one[:2])]


def _fields(pid: int) -> list[str]:
    """Of ``/proc/PID/stat``, from the third on: see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def only(found: Sequence[Process], kind: Kind, node: str) -> list[Process]:
    """The processes of one kind on one node. A rank's workers inherit its environment; the rank is the oldest."""
    return [each for each in found if each.kind == kind and each.node == node]


def gone(look: Callable[[], Sequence[Process]], patience: float) -> tuple[float, Sequence[Process]]:
    """Seconds until ``look`` finds no process, and the processes that are left after ``patience`` seconds."""
    started = time.perf_counter()
    while True:
        left = look()
        took = time.perf_counter() - started
        if not left or took > patience:
            return took, left
        time.sleep(LOOK)


def strike(found: Sequence[Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Signal them.

    Raises:
        BenchError: there is no process to signal.
    """
    if not found:
        raise BenchError("there is no process to kill")
    for each in found:
        with suppress(ProcessLookupError):
            os.kill(each.pid, number)


@dataclass(frozen=True)
class Cost:
    """CPU time of a process and the children that it has waited for, in seconds, and its memory in bytes."""

    cpu: float
    rss: int
    pss: int


def cost(pid: int) -> Cost:
    """From proc(5): ``/proc/PID/stat`` (fields 14 and 15, of itself) and ``smaps_rollup``.

    The fields 16 and 17, of children that were waited for, are omitted: the agent waits for the run's processes, too.
    """
    memory = dict(re.findall(r"^(Rss|Pss):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return Cost(sum(map(int, _fields(pid)[11:13])) / TICKS, int(memory["Rss"]) * 1024, int(memory["Pss"]) * 1024)
