"""Faults of a run on sandbox nodes: each is a function that injects one, and says what it did."""

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench_measure import BenchError
from launch_cluster import Run
from launch_proc import Kind, only, strike

CUT = 8.0  # seconds without a network


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        what: what it does, in words.
        inject: injects it on a node, and returns what it hit; ``BenchError`` if there is nothing to hit.
        ends: whether the attempt must end, so that a restart is expected.
        lasts: seconds after which it has its effect, and a step shows that the run continues.
        by_default: whether a run without spare nodes survives it.
    """

    what: str
    inject: Callable[[Run, str, random.Random], str]
    ends: bool = True
    lasts: float = 0.0
    by_default: bool = True


def _kill(kind: Kind, number: signal.Signals = signal.SIGKILL) -> Callable[[Run, str, random.Random], str]:
    def inject(run: Run, node: str, chance: random.Random) -> str:
        found = only(run.processes(), kind, node)
        victim = chance.choice(found) if kind == "rank" and found else None
        strike([victim] if victim else found[:1], number)
        return f"{number.name} to {kind} of {node}"

    return inject


def _cut(run: Run, node: str, _: random.Random) -> str:
    box = run.cluster.box
    box.unplug(node)
    back = threading.Timer(CUT, box.plug, [node])
    back.daemon = True
    back.start()
    return f"no network at {node} for {CUT:g} s"


def _tear(run: Run, node: str, chance: random.Random) -> str:
    """Cut the newest checkpoint's part in half, and kill a rank."""
    folder = Path(str(run.cluster.box.node_root(node)) + str(run.record()["folder"]))
    parts = sorted(folder.glob("job/out/iter_*/part-*.safetensors"), key=lambda path: path.stat().st_mtime)
    if not parts:
        raise BenchError("there is no checkpoint yet")
    os.truncate(parts[-1], parts[-1].stat().st_size // 2)
    return f"{parts[-1].parent.name} torn; " + _kill("rank")(run, node, chance)


def _controller(run: Run, *_: object) -> str:
    with suppress(ProcessLookupError):
        os.killpg(run.lines.process.pid, signal.SIGKILL)
    return "the following command killed"


def _lose(run: Run, node: str, _: random.Random) -> str:
    run.cluster.box.power_off(node)
    return f"{node} without power"


FAULTS: Mapping[str, Fault] = {
    "rank": Fault("a rank is killed", _kill("rank")),
    "stop": Fault("a rank is stopped (SIGSTOP)", _kill("rank", signal.SIGSTOP)),
    "launcher": Fault("the launcher is killed", _kill("launcher")),
    "cut": Fault(f"a node has no network for {CUT:g} s", _cut, ends=False, lasts=CUT),
    "tear": Fault("the newest checkpoint is torn, and a rank is killed", _tear),
    "controller": Fault("the command that follows the run is killed", _controller, ends=False, lasts=1.0),
    "agent": Fault("one process of an agent is killed", _kill("agent"), by_default=False),
    "node": Fault("a node loses its power for good", _lose, by_default=False),
}
