"""Collects the signals of a node's ranks for ``stragglers.py``, all from outside of the ranks.

A thread looks several times a second at what the main thread of each rank waits for. The kernel shows this without
stopping the process: /proc/PID/syscall has the system call and its arguments. The rest are counters that are read once
in a round. py-spy would show the line of code, but it costs a hundred times as much, and a rank that waits for NCCL
is in the same line as a rank that computes.

=======================  =============================================================================================
main thread              a round's numbers
=======================  =============================================================================================
run, delay               /proc/PID/schedstat: nanoseconds on a processor, and ready but waiting for one
data                     samples in which it reads or polls a pipe (a DataLoader's worker), or sleeps in Python
disk                     samples in which it or a worker that it waits for is in state D, except in a write
stall                    the largest delay of its threads and its workers
quota                    cpu.stat of its cgroup: the part of the periods in which it was throttled
gpu                      the samples of ``metrics.py``, and ``nvidia-smi pmon`` for processes of others
=======================  =============================================================================================

A wait in a futex or for a socket counts as waiting for other ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import struct
import subprocess
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from .processes import Stat, environment_of, read
from .queues import Queues

SAMPLES = 32.0  # looks at ranks per second, all ranks together; at most
FASTEST = 0.25  # seconds between looks at one rank, on average
QUEUES = 0.4  # seconds between looks at the sockets
QUEUED = 16 << 10  # bytes in a socket that count as waiting
WORKERS = 8  # of a rank that are looked at
THREADS = 128  # of a rank
_ADDRESSES = 64
_POLLED = 4  # descriptors of a poll

DATA, DISK = "data", "disk"


class Calls(NamedTuple):
    """Numbers of system calls of an architecture."""

    poll: Tuple[int, ...]
    select: Tuple[int, ...]
    sleep: int
    read: Tuple[int, ...]
    wait: Tuple[int, ...]  # for other threads and sockets
    write: Tuple[int, ...]


CALLS = {  # linux/arch/x86/entry/syscalls/syscall_64.tbl, linux/include/uapi/asm-generic/unistd.h
    # poll ppoll; select pselect6; clock_nanosleep; read readv; futex epoll_wait epoll_pwait recvfrom recvmsg accept;
    # write pwrite64 writev fsync fdatasync msync
    "x86_64": Calls((7, 271), (23, 270), 230, (0, 19), (202, 232, 281, 45, 47, 43), (1, 18, 20, 74, 75, 26)),
    "aarch64": Calls((73,), (72,), 115, (63, 65), (98, 22, 207, 212, 202), (64, 68, 66, 82, 83, 227)),
}
_ABSOLUTE = 1  # TIMER_ABSTIME: Python's time.sleep (3.11); C++ code that polls sleeps for a relative time


def waits_for(pid: int, workers: Sequence[int] = (), calls: Optional[Calls] = None) -> str:
    """What a main thread waits for: ``DATA``, ``DISK``, or "" while it runs or waits for other ranks."""
    calls = calls or CALLS.get(platform.machine())
    words = read("/proc/%d/syscall" % pid).split()
    if calls is None or len(words) < 2 or not words[0].lstrip(b"-").isdigit():  # "running"
        return ""
    number = int(words[0])
    if number in calls.wait:
        return ""
    if _for_data(pid, number, words, calls):
        return DISK if any(state_of(worker) == "D" for worker in workers[:WORKERS]) else DATA
    return DISK if number not in calls.write and state_of(pid) == "D" else ""


def _for_data(pid: int, number: int, words: List[bytes], calls: Calls) -> bool:
    if number in calls.poll:
        return any(_is_pipe(pid, fd) for fd in _polled(pid, int(words[1], 16), int(words[2], 16)))
    if number in calls.select:
        return int(words[1], 16) == 0  # no descriptor: Python's time.sleep before 3.11
    if number == calls.sleep:
        return int(words[2], 16) == _ABSOLUTE
    return number in calls.read and _is_pipe(pid, int(words[1], 16))


def _is_pipe(pid: int, fd: int) -> bool:
    try:
        return os.readlink("/proc/%d/fd/%d" % (pid, fd)).startswith("pipe:")  # noqa: PTH115
    except OSError:
        return False


def _polled(pid: int, address: int, count: int) -> List[int]:
    """The first descriptors of a poll: ``struct pollfd`` is an int and two shorts."""
    try:
        fd = os.open("/proc/%d/mem" % pid, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        data = os.pread(fd, 8 * min(count, _POLLED), address)
    except (OSError, OverflowError):
        return []
    finally:
        os.close(fd)
    return [struct.unpack_from("i", data, at)[0] for at in range(0, len(data) - 7, 8)]


def state_of(pid: int) -> str:
    """The state letter of a process; "" if it does not exist."""
    return read("/proc/%d/stat" % pid).rpartition(b")")[2].split(None, 1)[:1][0].decode() if pid else ""


class Watched(NamedTuple):
    """A rank to look at: its main process, the workers of its DataLoader, and the index of its GPU."""

    rank: int
    pid: int
    workers: Tuple[int, ...]
    gpu: Optional[int]


class _Counters(NamedTuple):
    at: float
    run: int
    delay: int
    others: Dict[int, int]  # delays of its other threads and of its workers
    periods: Tuple[int, int]  # of its cgroup: all, throttled


class Signals:
    """The signals of this node's ranks. ``close_round`` returns those since its last call, as JSON values."""

    def __init__(self) -> None:
        self._watched: Tuple[Watched, ...] = ()
        self._environments: Dict[Tuple[int, str], Optional[int]] = {}
        self._lock = threading.Lock()
        self._counts: Dict[int, Dict[str, int]] = {}
        self._queued: Dict[str, int] = {}
        self._looks = 0
        self._sockets = Queues()
        self._before: Dict[int, _Counters] = {}
        self._gpus: Dict[int, List[Dict[str, Any]]] = {}
        self._processes = GpuProcesses()
        self._over = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def watch(self, ranks: Dict[int, int], members: Dict[int, Stat]) -> None:
        """Set the ranks' main processes, ``{pid: rank}``, among the run's processes. Starts the thread."""
        children: Dict[int, List[int]] = {}
        for pid, stat in members.items():
            children.setdefault(stat.parent, []).append(pid)
        self._watched = tuple(
            Watched(rank, pid, tuple(sorted(children.get(pid, ()))), self._gpu(pid, members[pid]))
            for pid, rank in sorted(ranks.items())
            if pid in members
        )
        self._processes.own = {pid for each in self._watched for pid in (each.pid, *each.workers)}
        if self._thread is None and self._watched:
            self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
            self._thread.start()

    def gpus(self, values: Optional[Iterable[Dict[str, Any]]]) -> None:
        """Take a sample of the GPUs, see ``metrics.py``."""
        for each in values or ():
            self._gpus.setdefault(each["index"], []).append(each)

    def close(self) -> None:
        """End the thread and nvidia-smi."""
        self._over.set()
        self._processes.close()

    def close_round(self) -> Dict[str, Any]:
        """Return the signals of the round that ends now."""
        with self._lock:
            counts, self._counts = self._counts, {}
            queued, self._queued = self._queued, {}
            looks, self._looks = self._looks, 0
            own = sorted(self._sockets.own)[:_ADDRESSES]
        gpus, self._gpus = self._gpus, {}
        foreign = self._processes.shares() if gpus else {}
        now = {each.rank: _count(each) for each in self._watched}
        before, self._before = self._before, now
        ranks = {}
        for each in self._watched:
            if each.rank not in before:
                continue
            found = _rank(before[each.rank], now[each.rank], counts.get(each.rank, {}))
            if each.gpu is not None and each.gpu in gpus:
                found["gpu"] = dict(_gpu(gpus[each.gpu]), foreign=foreign.get(each.gpu, 0.0))
            ranks[str(each.rank)] = found
        shares = {address: round(count / looks, 3) for address, count in sorted(queued.items())} if looks else {}
        return {"ranks": ranks, "queues": shares, "addresses": own}

    def _gpu(self, pid: int, stat: Stat) -> Optional[int]:
        """The index of a rank's GPU for nvidia-smi; None if its variables do not say."""
        key = (pid, stat.start)
        if key not in self._environments:
            environment = environment_of(pid)
            self._environments[key] = gpu_of(environment.get("LOCAL_RANK"), environment.get("CUDA_VISIBLE_DEVICES"))
        return self._environments[key]

    def _run(self) -> None:
        """Look at the ranks until the end, at random times: a step's own rhythm must not matter."""
        due = 0.0
        while not self._over.wait(self._pause()):
            for each in self._watched:
                what = waits_for(each.pid, each.workers)
                with self._lock:
                    count = self._counts.setdefault(each.rank, {DATA: 0, DISK: 0, "all": 0})
                    count["all"] += 1
                    if what:
                        count[what] += 1
            if time.monotonic() >= due:
                self._look_at_queues()
                due = time.monotonic() + QUEUES
        self._sockets.close()

    def _pause(self) -> float:
        spread = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        return spread * max(FASTEST, len(self._watched) / SAMPLES)

    def _look_at_queues(self) -> None:
        waiting = self._sockets.look(time.monotonic())
        with self._lock:
            self._looks += 1
            for address, size in waiting.items():
                if size >= QUEUED:
                    self._queued[address] = self._queued.get(address, 0) + 1


def gpu_of(local: Optional[str], visible: Optional[str]) -> Optional[int]:
    """The GPU of a local rank: its place in CUDA_VISIBLE_DEVICES, which may be set for each rank."""
    if local is None or not local.isdigit():
        return None
    if visible is None:
        return int(local)
    listed = visible.split(",")
    chosen = listed[int(local)] if int(local) < len(listed) else listed[-1]
    return int(chosen) if chosen.isdigit() else None


def _count(watched: Watched) -> _Counters:
    run, delay = _schedstat("/proc/%d/schedstat" % watched.pid)
    others = {pid: _schedstat("/proc/%d/schedstat" % pid)[1] for pid in watched.workers}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/%d/task" % watched.pid)[:THREADS]:  # noqa: PTH208
            others[int(name)] = _schedstat("/proc/%d/task/%s/schedstat" % (watched.pid, name))[1]
    return _Counters(time.monotonic(), run, delay, others, periods(watched.pid))


def _schedstat(path: str) -> Tuple[int, int]:
    words = read(path).split()
    return (int(words[0]), int(words[1])) if len(words) > 1 else (0, 0)


def periods(pid: int) -> Tuple[int, int]:
    """The periods of a process's CPU quota so far, and those in which it was throttled; zeros without a quota."""
    for line in read("/proc/%d/cgroup" % pid).decode("utf-8", "replace").splitlines():
        number, names, path = [*line.split(":", 2), "", ""][:3]
        roots: Tuple[str, ...] = ()
        if number == "0" and not names:
            roots = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
        elif "cpu" in names.split(","):
            roots = ("/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu")
        for root in roots:
            values = dict(each.split()[:2] for each in read(root + path + "/cpu.stat").splitlines() if b" " in each)
            if b"nr_periods" in values:
                return int(values[b"nr_periods"]), int(values.get(b"nr_throttled", b"0"))
    return 0, 0


def _rank(before: _Counters, now: _Counters, count: Dict[str, int]) -> Dict[str, Any]:
    wall = max(1e-3, now.at - before.at)
    samples = max(1, count.get("all", 0))
    delays = [(value - before.others[key]) / 1e9 for key, value in now.others.items() if key in before.others]
    all_, throttled = (is_ - was for is_, was in zip(now.periods, before.periods))  # noqa: B905
    shares = {
        "run": (now.run - before.run) / 1e9 / wall,
        "delay": (now.delay - before.delay) / 1e9 / wall,
        "data": count.get(DATA, 0) / samples,
        "disk": count.get(DISK, 0) / samples,
        "stall": max(delays, default=0.0) / wall,
        "quota": throttled / all_ if all_ > 0 else 0.0,
    }
    return {name: round(min(1.0, max(0.0, value)), 4) for name, value in shares.items()}


_THROTTLED = {"hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown"}


def _gpu(samples: List[Dict[str, Any]]) -> Dict[str, Any]:
    """The means of a GPU's samples."""
    found: Dict[str, Any] = {}
    for name, source, unit in (
        ("use", "use", 0.01),
        ("power", "power", 1),
        ("clock", "clock", 1),
        ("memory", "memory", 1),
    ):
        values = [each[source] for each in samples if isinstance(each.get(source), (int, float))]
        found[name] = round(sum(values) * unit / len(values), 4) if values else None
    slowed = [bool(_THROTTLED & set(each.get("throttle") or ())) for each in samples]
    return dict(found, slowed=sum(slowed) / len(slowed) if slowed else 0.0)


PMON = ("nvidia-smi", "pmon", "-s", "u", "-d", "4")
_LINE = 4096  # bytes of a line


class GpuProcesses:
    """The processes of others on the GPUs, from an ``nvidia-smi pmon`` that repeats its output.

    ``own`` are the run's processes. In a container the driver may show other pids: then nothing is known.
    """

    def __init__(self, argv: Tuple[str, ...] = PMON) -> None:
        self.own: Set[int] = set()
        self._argv = argv
        self._child: Optional["subprocess.Popen[bytes]"] = None
        self._tried = False
        self._rest = b""

    def shares(self) -> Dict[int, float]:
        """By index, the part of the time since the last call in which processes of others used a GPU."""
        if self._child is None:
            self._start()
            return {}
        assert self._child.stdout is not None
        data = b""
        with contextlib.suppress(BlockingIOError):
            while len(data) < 1 << 20:
                part = os.read(self._child.stdout.fileno(), 64 << 10)
                data += part
                if not part:
                    self.close()
                    break
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-_LINE:]
        return foreign_shares((line[:_LINE].decode("ascii", "replace") for line in lines), self.own)

    def close(self) -> None:
        """Kill nvidia-smi without waiting: one stuck in its driver does not exit."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.kill()
            assert child.stdout is not None
            child.stdout.close()
            child.returncode = 0  # it is reaped with all children; Popen would wait for it again and again

    def _start(self) -> None:
        if self._tried:
            return
        self._tried = True  # one that exits is too old for pmon
        with contextlib.suppress(OSError):
            self._child = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            assert self._child.stdout is not None
            os.set_blocking(self._child.stdout.fileno(), False)


def foreign_shares(lines: Iterable[str], own: Set[int]) -> Dict[int, float]:
    """By index, the mean use of a GPU by processes that are not ``own``; empty if none of ``own`` is listed."""
    used: Dict[int, float] = {}
    looks: Dict[int, int] = {}
    known = False
    seen: Set[Tuple[int, str]] = set()  # of this look at all GPUs
    for line in lines:
        words = line.split()
        if len(words) < 4 or not words[0].isdigit():
            continue  # a heading
        index = int(words[0])
        if (index, words[1]) in seen:
            seen.clear()
        if not any(index == other for other, _ in seen):
            looks[index] = looks.get(index, 0) + 1
        seen.add((index, words[1]))
        if not words[1].isdigit():
            continue
        if int(words[1]) in own:
            known = True
        elif words[3].isdigit():
            used[index] = used.get(index, 0.0) + int(words[3])
    return {index: min(1.0, sum_ / 100 / looks[index]) for index, sum_ in used.items()} if known else {}
