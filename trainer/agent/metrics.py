"""Samples the resources that a run uses on its node: one JSON object per line in ``metrics.jsonl``.

====================  ===============================================================================================
``time``              seconds since the epoch
``gpus``              ``[{"index", "use", "memory", "memory_total", "power", "temperature"}]``: use in percent, memory
                      in bytes, watts, degrees Celsius; null if unsupported. Omitted without nvidia-smi, and if it has
                      not answered for 30 s
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

Rates are omitted in the first sample. Unreadable values are omitted. ``Metrics`` adds the attempt and its progress.

One nvidia-smi that repeats its output samples the GPUs (``Gpus``). Its start costs more than all other sampling
together, so it runs once. Its pipe is read without blocking, so an nvidia-smi that hangs because of a failed driver
costs nothing. It is a child of the agent but not a process of the run; ``pid`` identifies it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from .notify import DISK_FULL
from .processes import Proc, Stat, of_ranks, read
from .run_files import Events, NodePlan
from .supervisor.control import Control
from .textfile import Textfile

LIMIT = 64 << 20  # bytes of metrics.jsonl and the older part together

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
        return {self._gpus.pid} if self._gpus.pid is not None else set()

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


def append(path: str, sample: Dict[str, Any], limit: int = LIMIT) -> bool:
    """Append a line. A file longer than half of ``limit`` is renamed to ``<path>.1`` first.

    False if it could not be written, for example on a full disk; it never leaves half a line.
    """
    line = json.dumps(sample, separators=(",", ":")).encode() + b"\n"
    try:
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_size + len(line) > limit // 2:  # noqa: PTH116
                os.replace(path, path + ".1")  # noqa: PTH105
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                return False
        finally:
            os.close(fd)
    except OSError:
        return False
    return True


EVERY = 10.0  # seconds between samples
# Bytes per second, in and out of one port: more than an idle machine, less than any training that communicates.
COMMUNICATES = 1 << 20


class Metrics:
    """The samples of one attempt."""

    def __init__(self, plan: NodePlan, control: Control, events: Events, textfile: Textfile) -> None:
        self._path = str(plan.logs / "metrics.jsonl")
        self._sampler = Sampler(plan.data.first_rank, str(plan.folder))
        self._control, self._events, self._textfile = control, events, textfile
        self._known: Dict[str, Any] = {}  # of the progress
        self._due = 0.0
        self._writes = True

    def progress(self, fields: Dict[str, Any]) -> None:
        """Take the fields of a progress event."""
        self._known.update(fields)

    def look(self, members: Dict[int, Stat], now: float) -> Dict[str, Any]:
        """Take a sample if it is due, and return it; else an empty one."""
        if now < self._due:
            return {}
        self._due = now + EVERY
        sample = dict(self._sampler.sample(members), attempt=self._events.attempt, **self._known)
        if communicates(sample):
            self._control.last_traffic = now
        if self._writes and not append(self._path, sample):
            self._writes = False  # a full disk ends the log, not the run
            text = "%s is no longer written: the disk is full" % self._path
            self._events.emit("notice", kind=DISK_FULL, text=text)
        self._textfile.write(sample)
        return sample

    def close(self) -> None:
        """End the sampler's children."""
        self._sampler.close()


def communicates(sample: Dict[str, Any]) -> bool:
    """Whether a sample shows the traffic of a training run, on any port."""
    rates = [*sample.get("network", {}).values(), *sample.get("infiniband", {}).values()]
    return any(min(rate["in"], rate["out"]) >= COMMUNICATES for rate in rates)


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
)
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=" + ",".join(theirs for _, theirs, _ in QUERY),
    "--format=csv,noheader,nounits",
    "--loop=%d" % GPU_EVERY,
)


class Gpus:
    """The latest output of nvidia-smi. ``now`` is any monotonic clock, in seconds."""

    def __init__(self, argv: Tuple[str, ...] = NVIDIA_SMI) -> None:
        self._argv = argv
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._begun: Optional[float] = None
        self._rest = b""
        self._latest: Dict[int, Tuple[float, Dict[str, Any]]] = {}  # index: when it was printed, and its values
        self._there = True

    @property
    def pid(self) -> Optional[int]:
        """The pid of nvidia-smi while it is running."""
        return self._child.pid if self._child else None

    def look(self, now: float) -> Optional[List[Dict[str, Any]]]:
        """The last values of each GPU; None if there are none or they are too old."""
        self._listen(now)
        if self._child is None and (self._begun is None or now - self._begun >= AGAIN):
            self._start(now)
        fresh = [values for _, (at, values) in sorted(self._latest.items()) if now - at <= STALE]
        if self._child is not None and self._begun is not None:
            last_output = max([at for at, _ in self._latest.values()] + [self._begun])
            if now - last_output > STALE:
                self.close()
        return fresh or None

    def close(self) -> None:
        """Kill nvidia-smi without waiting: one stuck in its driver does not exit."""
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
        self._begun, self._rest = now, b""
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

    def _listen(self, now: float) -> None:
        if self._child is None or self._child.stdout is None:
            return
        data = b""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = os.read(self._child.stdout.fileno(), 64 << 10)
                data += part
                if not part:
                    self.close()
                    break
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            values = gpu(line.decode("ascii", "replace"))
            if values:
                self._latest[values["index"]] = (now, values)


def gpu(line: str) -> Optional[Dict[str, Any]]:
    """Parse a line of nvidia-smi; None for other text ("Unable to determine the device handle …")."""
    values = [_number(value) for value in line.split(",")]
    if len(values) != len(QUERY) or not isinstance(values[0], int):
        return None
    return {ours: None if value is None else value * unit for (ours, _, unit), value in zip(QUERY, values)}  # noqa: B905


def _number(text: str) -> Any:
    try:
        value = float(text)
    except ValueError:
        return None  # "[N/A]", "[Not Supported]", "[GPU requires reset]"
    return int(value) if value == int(value) else value
