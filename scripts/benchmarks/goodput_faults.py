"""Faults of a run on sandbox nodes: each is a function that injects one, and says what it did."""

import os
import random
import shlex
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench_measure import BenchError
from launch_cluster import Run
from launch_proc import Kind, only, strike

from provision.errors import ClusterctlError
from provision.sandbox import Sandbox

CUT = 8.0  # seconds without a network
FULL = 8.0  # seconds of a full disk
DISK = "8g"  # of memory, for the folders of the runs; the checks before a run want some free space
LARGE = 16 << 30  # bytes: a disk of the machine


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        what: what it does, in words.
        inject: injects it on a node, and returns what it hit; ``BenchError`` if there is nothing to hit.
        ends: whether the attempt must end, so that a restart is expected.
        lasts: seconds after which it has its effect, and a step shows that the run continues.
        spare: it may cost a node, so that a run without a spare node does not survive it.
        launcher: the launcher that it needs; "": any.
    """

    what: str
    inject: Callable[[Run, str, random.Random], str]
    ends: bool = True
    lasts: float = 0.0
    spare: bool = False
    launcher: str = ""


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
    """Kill the command that started the run. Later ones attach again, and are killed once they show steps."""
    lines = run.lines
    if lines.process.poll() is not None:
        lines = run.cluster.command("logs", "-f", run.id)
        lines.until(r"step \d")
    with suppress(ProcessLookupError):
        os.killpg(lines.process.pid, signal.SIGKILL)
    return f"clusterctl {lines.process.args[1]} killed"  # type: ignore[index]


def _agent(run: Run, node: str, chance: random.Random) -> str:
    """Kill one of the two processes of an agent, or both at once."""
    found = only(run.processes(), "agent", node)
    hit = chance.choice([found[:1], found[1:2], found[:2]])
    strike(hit)
    return f"SIGKILL to {' and '.join('guard' if each is found[0] else 'supervisor' for each in hit)} of {node}"


def mount(box: Sandbox, node: str, folder: str, size: str = DISK, options: str = "") -> None:
    """Give a node a small disk for the folders of its runs, which is lost with its power; or change its size.

    Raises:
        BenchError: that failed.
    """
    place = shlex.quote(folder)
    script = f"mkdir -p {place} && mount -t tmpfs -o {options}size={size} disk {place}"
    done = box.enter(node, ["sh", "-c", script])
    if done.returncode:
        raise BenchError(f"{node} gets no disk: {done.stderr.strip()}")


def _fill(run: Run, node: str, _: random.Random) -> str:
    """Shrink the disk of the runs' folders to what is used. No file needs memory then."""
    box, runs = run.cluster.box, str(Path(str(run.record()["folder"])).parent)
    disk = os.statvfs(f"{box.node_root(node)}{runs}")
    used = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    if disk.f_blocks * disk.f_frsize > LARGE:
        raise BenchError("the runs' folders have no small disk")
    mount(box, node, runs, str(used + disk.f_frsize), "remount,")

    def undo() -> None:
        with suppress(BenchError, ClusterctlError):  # the sandbox was removed
            mount(box, node, runs, DISK, "remount,")

    back = threading.Timer(FULL, undo)
    back.daemon = True
    back.start()
    return f"the disk of {node} is full for {FULL:g} s"


def _lose(run: Run, node: str, _: random.Random) -> str:
    run.cluster.box.unplug(node)  # or the kernel closes the connections of the processes that it kills
    run.cluster.box.power_off(node)
    return f"{node} without power"


FAULTS: Mapping[str, Fault] = {
    "rank": Fault("a rank is killed", _kill("rank")),
    "stop": Fault("a rank is stopped (SIGSTOP)", _kill("rank", signal.SIGSTOP)),
    "launcher": Fault("the launcher is killed", _kill("launcher"), launcher="torchrun"),
    "cut": Fault(f"a node has no network for {CUT:g} s", _cut, ends=False, lasts=CUT),
    "tear": Fault("the newest checkpoint is torn, and a rank is killed", _tear),
    "disk": Fault(f"a node's disk is full for {FULL:g} s", _fill, ends=False, lasts=FULL),
    "controller": Fault("the command that follows the run is killed", _controller, ends=False, lasts=1.0),
    "agent": Fault("one process of an agent is killed, or both", _agent, spare=True),
    "node": Fault("a node loses its power and its disk for good", _lose, spare=True),
}
