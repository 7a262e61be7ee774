"""Where the ranks of a run are: their stacks, and which of them is somewhere else than the others.

py-spy (in the release, or on PATH) reads the stacks of a Python process from outside. Without it, or where it may
not look into another process, /proc tells at least what the process waits for; and a rank that runs with
``PYTHONFAULTHANDLER=1`` writes its stacks into its own log when it gets SIGABRT, of which it dies
(``ask_faulthandler``). ``odd`` reads all three.

A rank in a collective operation waits for the others by definition, so where some are in one and some are not, those
that are not keep the others waiting.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from typing import Dict, List, Optional, Tuple

from ..processes.proc import Stat, read, stat_of
from ..processes.ranks import Proc, mains, of_ranks

PATIENCE = 7.0  # seconds for the stacks of all ranks together; all of this stays below GATHER of ``hangs.py``
AGAIN = 3.0  # the same, for those that could not be paused
DYING = 0.4  # seconds for py-spys that were killed
STOPPED = "state T"  # how a text says that its process is stopped

# Files in which Python waits for other ranks; the wait itself is C++ and shows no frame of its own.
_COLLECTIVE = re.compile(
    r"^torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger|rendezvous)\.py"
    r"|^torch/distributed/(?:fsdp|_composable)/"
    r"|^torch/nn/parallel/distributed\.py"  # the hooks of DistributedDataParallel
    r"|^torch/nn/modules/_functions\.py"  # SyncBatchNorm
    r"|^deepspeed/comm/"
)
_WAITS = (  # (function, file): here a rank sits until its gradients, or the GPU, have been in a collective
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
    """py-spy of the release, else the one on PATH, else None."""
    ours = os.path.join(prefix or "/nonexistent", "bin", "py-spy")  # noqa: PTH118
    return ours if os.access(ours, os.X_OK) else shutil.which("py-spy")


def collect(members: Dict[int, Stat], first: int, prefix: str) -> Dict[int, str]:
    """The stacks of this node's ranks, by global rank; takes 11 s at most, whatever they do.

    Each text begins with a line "pid 123, state S", and goes on with what py-spy or else /proc says.
    """
    pids = mains(members, of_ranks(members, Proc(first).rank), first, set())
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


def _dump(spy: str, pids: Dict[int, int], options: List[str], patience: float) -> Dict[int, str]:
    """What py-spy says of those that it can read, all at once."""
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
            said = child.communicate(timeout=max(0.01, limit - time.monotonic()))[0].decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            late.append(child)
            continue
        if frames(said):  # its exit code may have been collected by somebody else
            found[rank] = said
    _end(late)
    return found


def _end(children: "List[subprocess.Popen[bytes]]") -> None:
    """Kill these py-spys; the kernel lets go of what they had paused. One that hangs in the kernel is left to it."""
    for child in children:
        child.kill()
    limit = time.monotonic() + DYING
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
        try:
            child.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.returncode = 0  # whoever reaps all children gets it; Popen would ask for it again and again


def of_proc(pid: int) -> str:
    """What /proc says of where a process is: the kernel function, the system call and, to root, the kernel's stack."""
    lines = []
    for label, name in (("in the kernel", "wchan"), ("system call", "syscall"), ("kernel stack", "stack")):
        said = read("/proc/%d/%s" % (pid, name)).decode("ascii", "replace").strip()
        if said and said != "0":
            lines.append("    %s: %s" % (label, said.replace("\n", "\n        ")))
    return "\n".join(lines) or "    /proc shows nothing"


def ask_faulthandler(pid: int) -> bool:
    """Let a Python process that was started with PYTHONFAULTHANDLER=1 write its stacks to its stderr, and die.

    False when there is no such process, or it is another user's. A stopped one is woken, else it would write nothing.
    """
    try:
        os.kill(pid, signal.SIGABRT)
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return False
    return True


def frames(text: str) -> List[Frame]:
    """The main thread's frames in what py-spy or faulthandler wrote, innermost first; without addresses and pids.

    The main thread is the one that py-spy calls so, else the one that ends in ``<module>``, else the first.
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
    """Whether a stack is in a collective operation, and so waits for other ranks."""
    for function, path, _ in found[:3]:
        name = function.rpartition(".")[2]
        if _COLLECTIVE.match(path) or _NATIVE.search(function):
            return True
        if any(name == waiting and path.startswith(start) for waiting, start in _WAITS):
            return True
    return False


def _place(text: str) -> Tuple[Frame, ...]:
    """What is compared: the three innermost frames, or the function of the kernel where there are no frames."""
    found = tuple(frames(text)[:3])
    if found:
        return found
    kernel = _KERNEL.search(text)
    return ((kernel.group(1), "", ""),) if kernel else ()


def odd(texts: Dict[int, str]) -> List[int]:
    """The ranks that are somewhere else than they should be, from the stacks of all ranks; empty when none stands out.

    A stopped rank always; then those outside a collective that the others are in; then those that differ from what
    more than half of all have in common.
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
        # Most may be in a wait that is not known as one, as for a number from the GPU.
        return sorted(others if majority and len(outside) > len(waiting) and others else outside)
    return sorted(rank for rank, place in known.items() if place != common) if majority else []
