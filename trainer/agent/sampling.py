"""Samples the resources of a node, and those that a run uses there: an object of these fields.

====================  ===============================================================================================
``time``              seconds since the epoch
``gpus``              ``[{"index", "use", "memory", "memory_total", "power", "temperature", "clock", "clock_max",
                      "throttle"}]``: use in percent, memory in bytes, watts, degrees Celsius, MHz of the SMs, and
                      names of ``contract/throttle.py``; null if unsupported. Omitted without nvidia-smi, and if it
                      has not answered for 30 s
``memory_available``  bytes (MemAvailable); ``memory_total``
``rss``               resident bytes of the run's processes that are not shared with files
``load``              the load average of one minute
``cpu``               ``{rank: cores}``: processor time of each rank with its workers since the last sample; 1.5 is one
                      and a half cores
``network``           ``{interface: {"in", "out"}}`` in bytes per second, without loopback and containers' interfaces
``infiniband``        ``{"mlx5_0/1": {"in", "out"}}`` in bytes per second, of the port's own counters: ``network`` does
                      not include RDMA
``disk_free``         free bytes for this user on the disk of the run's folder
====================  ===============================================================================================

Rates are omitted in the first sample. Unreadable values are omitted.

One nvidia-smi that repeats its output samples the GPUs (``Gpus``). Its start costs more than all other sampling
together, so it runs once; another one asks once for what does not change. Their pipes are read without blocking, so an
nvidia-smi that hangs because of a failed driver costs nothing. They are children of the agent but no processes of the
run; ``pids`` identifies them.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from .contract.throttle import reasons
from .processes import Proc, Stat, of_ranks, read

_VIRTUAL = ("lo", "veth", "cali", "docker", "br-", "virbr", "cni", "flannel", "lxc")  # prefixes of names
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """Takes samples for one attempt of a run on this node. ``folder`` is the run's folder.

    ``first_rank`` is the global rank of local rank 0. ``sys`` and ``proc`` replace /sys and /proc.
    """

    def __init__(
        self,
        first_rank: int = 0,
        folder: str = ".",
        gpus: Optional[Gpus] = None,
        clock: Callable[[], float] = time.monotonic,
        proc: str = "/proc",
        sys: str = "/sys",
    ) -> None:
        self._ranks = Proc(first_rank)
        self._folder = folder
        self._gpus = gpus or Gpus()
        self._clock = clock
        self._proc, self._sys = proc, sys
        self._at: Optional[float] = None
        self._ticks: Dict[Tuple[int, str], int] = {}
        self._network: Dict[str, Tuple[int, int]] = {}
        self._infiniband: Dict[str, Tuple[int, int]] = {}

    def own(self) -> Set[int]:
        """Pids of the sampler's own children: they are the agent's descendants, but not processes of the run."""
        return self._gpus.pids

    def gpus(self) -> Dict[str, int]:
        """The indices of the GPUs that nvidia-smi listed at the start, by UUID."""
        return self._gpus.indices

    def close(self) -> None:
        """End the sampler's own children."""
        self._gpus.close()

    def sample(self, members: Dict[int, Stat]) -> Dict[str, Any]:
        """Take one sample, with the fields of the table above. ``members`` are the run's living processes."""
        now = self._clock()
        elapsed = now - self._at if self._at is not None else 0.0
        self._at = now
        members = {pid: stat for pid, stat in members.items() if pid not in self.own()}
        sample: Dict[str, Any] = {"time": round(time.time(), 3), "rss": sum(map(_resident, members))}
        gpus = self._gpus.look(now)
        if gpus is not None:
            sample["gpus"] = gpus
        sample.update(memory(read(self._proc + "/meminfo").decode()))
        with contextlib.suppress(OSError):
            sample["load"] = round(os.getloadavg()[0], 2)
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._folder)
            sample["disk_free"] = disk.f_bavail * disk.f_frsize
        cpu = self._cpu(members, elapsed)
        network, self._network = self._network, traffic(read(self._proc + "/net/dev").decode())
        infiniband, self._infiniband = self._infiniband, ports(self._sys)
        if elapsed > 0:
            sample["cpu"] = cpu
            sample["network"] = _rates(network, self._network, elapsed)
            sample["infiniband"] = _rates(infiniband, self._infiniband, elapsed)
        return sample

    def _cpu(self, members: Dict[int, Stat], elapsed: float) -> Dict[str, float]:
        """The cores that each rank used. JSON has no numbers as keys."""
        ranks = of_ranks(members, self._ranks.rank)
        self._ranks.forget(members)
        before, self._ticks = self._ticks, {(pid, stat.start): stat.ticks for pid, stat in members.items()}
        used: Dict[int, int] = {}
        for pid, rank in ranks.items():
            key = (pid, members[pid].start)
            used[rank] = used.get(rank, 0) + members[pid].ticks - before.get(key, members[pid].ticks)
        return {str(rank): round(ticks / _TICKS / elapsed, 2) for rank, ticks in sorted(used.items()) if elapsed > 0}


def _resident(pid: int) -> int:
    """Bytes of a process's own memory, from /proc/PID/statm (proc(5)): resident less shared."""
    fields = read("/proc/%d/statm" % pid).split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if len(fields) > 2 else 0


def memory(text: str) -> Dict[str, int]:
    """From /proc/meminfo (proc(5), in kB)."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            found["memory_available" if name == "MemAvailable" else "memory_total"] = int(value.split()[0]) << 10
    return found


def traffic(text: str) -> Dict[str, Tuple[int, int]]:
    """Bytes in and out of each interface so far, from /proc/net/dev (proc(5)): the first and the ninth number."""
    found = {}
    for line in text.splitlines()[2:]:
        name, _, values = line.partition(":")
        numbers = values.split()
        if len(numbers) > 8 and not name.strip().startswith(_VIRTUAL):
            found[name.strip()] = (int(numbers[0]), int(numbers[8]))
    return found


def ports(sys: str) -> Dict[str, Tuple[int, int]]:
    """Bytes in and out of each InfiniBand port so far. The kernel counts words of four bytes (IB specification)."""
    found = {}
    for counters in sorted(Path(sys, "class/infiniband").glob("*/ports/*/counters")):
        values = [read(str(counters / name)).strip() for name in ("port_rcv_data", "port_xmit_data")]
        if all(value.isdigit() for value in values):
            port = "%s/%s" % (counters.parents[2].name, counters.parent.name)
            found[port] = (4 * int(values[0]), 4 * int(values[1]))
    return found


def _rates(
    before: Dict[str, Tuple[int, int]], now: Dict[str, Tuple[int, int]], elapsed: float
) -> Dict[str, Dict[str, int]]:
    """Bytes per second. Skips a counter that went back: it was reset."""
    rates = {}
    for name in sorted(now.keys() & before.keys()):
        moved = [is_ - was for is_, was in zip(now[name], before[name])]  # noqa: B905
        if min(moved) >= 0:
            rates[name] = {"in": round(moved[0] / elapsed), "out": round(moved[1] / elapsed)}
    return rates


GPU_EVERY = 10  # seconds between nvidia-smi's outputs
STALE = 30.0  # seconds after which its output is out of date
AGAIN = 300.0  # seconds after which one that exited or hangs is restarted

# nvidia-smi --help-query-gpu: our name, theirs, the factor to our unit
QUERY = (
    ("index", "index", 1),
    ("use", "utilization.gpu", 1),
    ("memory", "memory.used", 1 << 20),
    ("memory_total", "memory.total", 1 << 20),
    ("power", "power.draw", 1),
    ("temperature", "temperature.gpu", 1),
    ("clock", "clocks.current.sm", 1),
)
# The last field. Drivers before 535.54 know the second name only, and very old ones neither.
THROTTLE = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")
FORMAT = "--format=csv,noheader,nounits"
# Asked once: on an H100, clocks.max.sm takes four times the processor time of all other fields together.
CONSTANTS = ("nvidia-smi", "--query-gpu=index,clocks.max.sm,uuid", FORMAT)
_UNKNOWN = "is not a valid field"
_LINE = 4096  # bytes of a line
_GPUS = 1024  # indices
USERS = 256  # processes on the GPUs

Command = Tuple[str, ...]


def nvidia_smi(every: int = GPU_EVERY) -> Tuple[Command, ...]:
    """The commands that print a line for each GPU, again and again; which one the driver understands is tried."""
    fields = ",".join(theirs for _, theirs, _ in QUERY)
    return tuple(
        ("nvidia-smi", "--query-gpu=" + fields + ("," + name if name else ""), FORMAT, "--loop=%d" % every)
        for name in THROTTLE
    )


class Output:
    """The lines of a program that repeats its output. ``now`` is any monotonic clock, in seconds.

    ``commands`` are tried in order, while nvidia-smi does not know a field of the one before. The last one is started
    again after ``again`` seconds if it exited; None: never.
    """

    def __init__(self, commands: Sequence[Command], again: Optional[float] = AGAIN) -> None:
        self._argv, *self._older = commands
        self._again = again
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._begun: Optional[float] = None
        self._rest = b""
        self._there = True
        self.heard: Optional[float] = None  # when it started or printed last

    @property
    def pid(self) -> Optional[int]:
        """The program's pid while it is running."""
        return self._child.pid if self._child else None

    def lines(self, now: float) -> List[str]:
        """The lines since the last call, without waiting. Starts the program if it is due."""
        lines = self._listen(now)
        if self._older and any(_UNKNOWN in line for line in lines):
            self.close()
            self._argv, self._begun = self._older.pop(0), None
        if self._child is None and self._is_due(now):
            self._start(now)
        return lines

    def _is_due(self, now: float) -> bool:
        return self._begun is None or (self._again is not None and now - self._begun >= self._again)

    def close(self) -> None:
        """Kill the program without waiting: one stuck in its driver does not exit."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):
            child.kill()
        assert child.stdout is not None
        child.stdout.close()
        if child.poll() is None:
            child.returncode = 0  # it is reaped with all children; Popen would wait for it again and again

    def _start(self, now: float) -> None:
        if not self._there:
            return
        self._begun, self.heard, self._rest = now, now, b""
        if not any(os.access(Path(folder, self._argv[0]), os.X_OK) for folder in os.get_exec_path()):
            self._there = False  # it is not installed; a failed start would cost a fork
            return
        try:
            child = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._there = False
            return
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._child = child

    def _listen(self, now: float) -> List[str]:
        if self._child is None or self._child.stdout is None:
            return []
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = os.read(self._child.stdout.fileno(), 64 << 10)
                data += part
                if not part:
                    self.close()
                    break
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE:]
        if lines:
            self.heard = now
        return [line[:_LINE].decode("utf-8", "replace") for line in lines]


class Gpus:
    """The latest values of each GPU."""

    def __init__(self, commands: Sequence[Command] = nvidia_smi(), constants: Command = CONSTANTS) -> None:
        self._output = Output(commands)
        self._constants = Output([constants], again=None)
        self._latest: Dict[int, Tuple[float, Dict[str, Any]]] = {}  # index: when it was printed, and its values
        self._clock_max: Dict[int, Any] = {}
        self.indices: Dict[str, int] = {}  # by UUID

    @property
    def pids(self) -> Set[int]:
        """The pids of nvidia-smi while it is running."""
        return {pid for pid in (self._output.pid, self._constants.pid) if pid is not None}

    def look(self, now: float) -> Optional[List[Dict[str, Any]]]:
        """The last values of each GPU; None if there are none or they are too old."""
        self._take(self._constants.lines(now))
        for line in self._output.lines(now):
            values = gpu(line)
            if values:
                self._latest[values["index"]] = (now, values)
        for output in (self._output, self._constants):
            if output.heard is not None and now - output.heard > STALE:
                output.close()
        fresh = [values for _, (at, values) in sorted(self._latest.items()) if now - at <= STALE]
        return [dict(values, clock_max=self._clock_max.get(values["index"])) for values in fresh] or None

    def _take(self, lines: List[str]) -> None:
        for line in lines:
            index, _, rest = line.partition(",")
            number, clock = _number(index), _number(rest.partition(",")[0])
            if isinstance(number, int) and 0 <= number < _GPUS:
                self._clock_max[number] = clock
                self.indices[rest.partition(",")[2].strip()] = number

    def close(self) -> None:
        """End nvidia-smi, and take what it has printed about the GPUs."""
        self._output.close()
        if self._constants.heard is not None:
            self._take(self._constants.lines(self._constants.heard))
        self._constants.close()


def gpu(line: str) -> Optional[Dict[str, Any]]:
    """Parse a line of nvidia-smi; None for other text ("Unable to determine the device handle …")."""
    fields = line.split(",")
    values = [_number(value) for value in fields[: len(QUERY)]]
    if not len(QUERY) <= len(fields) <= len(QUERY) + 1 or not isinstance(values[0], int) or not 0 <= values[0] < _GPUS:
        return None
    pairs = zip(QUERY, values)  # noqa: B905 - Python 3.8
    found = {ours: None if value is None else value * unit for (ours, _, unit), value in pairs}
    return dict(found, throttle=reasons(fields[-1].strip()) if len(fields) > len(QUERY) else None)


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return None  # "[N/A]", "[Not Supported]", "[GPU requires reset]"
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) else value
