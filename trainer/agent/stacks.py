"""Collects the stacks of a run's ranks, and finds the rank that differs from the others.

py-spy (in the release, or on PATH) reads the stacks of a Python process from outside. Without it, or without
permission, /proc shows at least what the process waits for. A rank with ``PYTHONFAULTHANDLER=1`` writes its stacks to
its own log when it gets SIGABRT, and dies of it (``ask_faulthandler``). ``outliers`` reads all three formats.

A rank in a collective operation waits for the others. If some ranks are in one and some are not, those outside block
the others.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import subprocess
import time
from typing import Dict, List, Optional, Tuple

from .processes import Proc, Stat, main_processes, of_ranks, read, stat_of

PATIENCE = 7.0  # seconds for the stacks of all ranks together; all of this stays below GATHER of ``hangs.py``
AGAIN = 3.0  # seconds for processes that could not be paused
DYING = 0.4  # seconds for py-spys that were killed
STOPPED = "state T"  # the end of a text's first line if its process is stopped

# Files in which Python waits for other ranks; the wait itself is C++ and shows no frame of its own.
_COLLECTIVE = re.compile(
    r"^torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger|rendezvous)\.py"
    r"|^torch/distributed/(?:fsdp|_composable)/"
    r"|^torch/nn/parallel/distributed\.py"  # the hooks of DistributedDataParallel
    r"|^torch/nn/modules/_functions\.py"  # SyncBatchNorm
    r"|^deepspeed/comm/"
)
_WAITS = (  # (function, file): a rank waits here for its gradients or the GPU, which wait for a collective
    ("_engine_run_backward", "torch/autograd/graph.py"),
    ("synchronize", "torch/cuda/"),
    ("synchronize", "deepspeed/accelerator/"),
    ("wait", "deepspeed/runtime/zero/"),
)
_NATIVE = re.compile(r"\bnccl[A-Z_]|\bgloo::|c10d::|ncclKernel|ncclDevKernel")

_THREAD = re.compile(r"^(?:Current )?[Tt]hread (\S+)")
_PY_SPY = re.compile(r"^\s+(.+) \((.+?)(?::(\d+))?\)$")  # "    train (ranks.py:16)"
_FAULTHANDLER = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')  # Python's Doc/library/faulthandler.rst
_KERNEL = re.compile(r"^ +in the kernel: (\S+)", re.MULTILINE)

Frame = Tuple[str, str, str]  # function, file below site-packages, line


def program(prefix: str) -> Optional[str]:
    """The path of py-spy: in the release, else on PATH, else None."""
    import shutil  # noqa: PLC0415 - it imports the compressors, and most runs do not hang

    ours = os.path.join(prefix or "/nonexistent", "bin", "py-spy")  # noqa: PTH118
    return ours if os.access(ours, os.X_OK) else shutil.which("py-spy")


def collect(members: Dict[int, Stat], first: int, prefix: str) -> Dict[int, str]:
    """Collect the stacks of this node's ranks, by global rank, in at most 11 s.

    Each text starts with a line "pid 123, state S", followed by the output of py-spy or the fields of /proc.
    """
    pids = main_processes(members, of_ranks(members, Proc(first).rank), first, set())
    heads = {}
    for rank, pid in pids.items():
        stat = stat_of(pid)
        heads[rank] = "pid %d, %s" % (pid, "state %s" % stat.state if stat else "gone")
    spy = program(prefix)
    found: Dict[int, str] = {}
    if spy:
        held = {rank for rank, head in heads.items() if head.endswith(STOPPED)}  # it cannot be paused
        found = _dump(spy, {rank: pid for rank, pid in pids.items() if rank not in held}, [], PATIENCE)
        rest = {rank: pid for rank, pid in pids.items() if rank not in found}
        found.update(_dump(spy, rest, ["--nonblocking"], AGAIN))
    return {rank: "%s\n%s" % (heads[rank], found.get(rank) or of_proc(pid)) for rank, pid in sorted(pids.items())}


def of_rank(rank: int, members: Dict[int, Stat], first: int, prefix: str) -> str:
    """The stacks of one rank of this node, without pausing it; "" if it is not here. Takes at most 4 s."""
    pid = main_processes(members, of_ranks(members, Proc(first).rank), first, set()).get(rank)
    spy = program(prefix)
    if pid is None:
        return ""
    return (_dump(spy, {rank: pid}, ["--nonblocking"], AGAIN).get(rank) if spy else None) or of_proc(pid)


def where(text: str) -> str:
    """The innermost frames of a stack, or the kernel's function, as a phrase; "" if it has neither."""
    return " < ".join("%s (%s:%s)" % frame if frame[1] else "%s in the kernel" % frame[0] for frame in _place(text))


def _dump(spy: str, pids: Dict[int, int], options: List[str], patience: float) -> Dict[int, str]:
    """Run py-spy for all processes at once. Returns the output for those that it can read."""
    started = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError):
            started[rank] = subprocess.Popen(
                [spy, "dump", *options, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
    limit = time.monotonic() + patience
    found = {}
    late = []
    for rank, child in started.items():
        try:
            output = child.communicate(timeout=max(0.01, limit - time.monotonic()))[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            late.append(child)
            continue
        if frames(output):  # its exit code may have been reaped elsewhere
            found[rank] = output
    _end(late)
    return found


def _end(children: "List[subprocess.Popen[bytes]]") -> None:
    """Kill these py-spys; the kernel then resumes what they had paused. Does not wait for one stuck in the kernel."""
    for child in children:
        child.kill()
    limit = time.monotonic() + DYING
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
        try:
            child.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.returncode = 0  # it is reaped with all children; Popen would wait for it again and again


def of_proc(pid: int) -> str:
    """A process's position from /proc: the kernel function, the system call and, for root, the kernel's stack."""
    lines = []
    for label, name in (("in the kernel", "wchan"), ("system call", "syscall"), ("kernel stack", "stack")):
        output = read("/proc/%d/%s" % (pid, name)).decode("ascii", "replace").strip()
        if output and output != "0":
            lines.append("    %s: %s" % (label, output.replace("\n", "\n        ")))
    return "\n".join(lines) or "    /proc shows nothing"


def ask_faulthandler(pid: int) -> bool:
    """Make a Python process with PYTHONFAULTHANDLER=1 write its stacks to its stderr and die.

    False if there is no such process, or it belongs to another user. A stopped process is continued, so that it writes.
    """
    try:
        os.kill(pid, signal.SIGABRT)
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return False
    return True


def frames(text: str) -> List[Frame]:
    """Parse the main thread's frames from py-spy's or faulthandler's output, innermost first.

    The main thread is the one with that name in py-spy's output, else the one that ends in ``<module>``, else the
    first.
    """
    threads: List[Tuple[str, List[Frame]]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append((line, []))
        elif threads:
            spy, fault = _PY_SPY.match(line), _FAULTHANDLER.match(line)
            if fault:
                threads[-1][1].append((fault.group(3), _short(fault.group(1)), fault.group(2)))
            elif spy:
                threads[-1][1].append((spy.group(1), _short(spy.group(2)), spy.group(3) or ""))
    for line, found in threads:
        if "MainThread" in line:
            return found
    for _, found in threads:
        if found and found[-1][0] == "<module>":
            return found
    return threads[0][1] if threads else []


def _short(path: str) -> str:
    return re.sub(r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/|^/.*/", "", path)


def waits(found: List[Frame]) -> bool:
    """Whether a stack is in a collective operation and so waits for other ranks."""
    for function, path, _ in found[:3]:
        name = function.rpartition(".")[2]
        if _COLLECTIVE.match(path) or _NATIVE.search(function):
            return True
        if any(name == waiting and path.startswith(start) for waiting, start in _WAITS):
            return True
    return False


def _place(text: str) -> Tuple[Frame, ...]:
    """The compared position: the three innermost frames, or the kernel function without frames."""
    found = tuple(frames(text)[:3])
    if found:
        return found
    kernel = _KERNEL.search(text)
    return ((kernel.group(1), "", ""),) if kernel else ()


def outliers(texts: Dict[int, str]) -> List[int]:
    """Find the ranks that differ, from the stacks of all ranks; empty if none does.

    A stopped rank always differs. Otherwise it is the ranks outside a collective that the others are in, or else those
    that differ from a majority.
    """
    stopped = [rank for rank, text in texts.items() if text.partition("\n")[0].endswith((STOPPED, "gone"))]
    if stopped:
        return sorted(stopped)
    places = {rank: _place(text) for rank, text in texts.items()}
    known = {rank: place for rank, place in places.items() if place}
    waiting = {rank for rank in known if waits(frames(texts[rank]))}
    outside = set(known) - waiting
    common, count = (collections.Counter(known.values()).most_common(1) or [((), 0)])[0]
    majority = 2 * count > len(known) > 2
    if waiting and outside:
        others = {rank for rank in outside if known[rank] != common}
        # The majority may be in an unknown kind of wait, for example for a number from the GPU.
        return sorted(others if majority and len(outside) > len(waiting) and others else outside)
    return sorted(rank for rank, place in known.items() if place != common) if majority else []
