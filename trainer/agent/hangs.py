"""Detects hangs of a run, and collects what is needed to explain them.

===============  ==================================================================================================
``stopped``      a process of a rank is stopped (SIGSTOP) or held by a debugger for 5 s
``dead``         a rank's process died, or exited during training, while others are running, for 5 s
``no progress``  the run has shown no progress for too long (``silence.py``)
===============  ==================================================================================================

Only node rank 0 judges that there is no progress: ranks advance together, and its log shows the steps. A process that
waits uninterruptibly for a minute causes only a notice, because a disk may be slow.

``Watch`` only decides: its methods get what it knows, with a clock that goes forward. ``Hangs`` acts. It collects the
stacks of all ranks, names the rank that differs, and then stops the run or warns. Stacks take seconds, and a failure
elsewhere must not wait: a thread collects this node's, and the link brings those of the other nodes.

py-spy (in the release, or on PATH) reads the stacks of a Python process from outside. Without it, or without
permission, /proc shows at least what the process waits for. A rank with ``PYTHONFAULTHANDLER=1`` writes its stacks to
its own log when it gets SIGABRT, and dies of it (``ask_faulthandler``). ``outliers`` reads all three formats. A rank in
a collective operation waits for the others. If some ranks are in one and some are not, those outside block the others.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

from .contract.plan import Plan
from .processes import Proc, Stat, main_processes, of_ranks, read, stat_of
from .run_files import Events, NodePlan
from .silence import TRAINING, Silence
from .supervisor.control import Control
from .tracker import ProcessTracker

STOPPED = 5.0  # seconds in a state before it counts
WAITING = 60.0
ASLEEP = 30.0  # seconds between two looks that show that the agent itself was delayed


class Hang(NamedTuple):
    """A hang: the kind (``stopped``, ``dead`` or ``no progress``), the rank or None, and a sentence."""

    kind: str
    rank: Optional[int]
    text: str


class Watch:
    """Watches one attempt of a run on one node. ``proc`` reads /proc."""

    def __init__(self, plan: Plan, proc: Optional[Proc] = None) -> None:
        self._first = plan.first_rank
        self._judges = plan.node_rank == 0
        self._proc = proc or Proc(self._first)
        self._silence = Silence(plan.hang.after, self._proc)
        self._notices: List[str] = []
        self._reported: Set[Tuple[str, Optional[int]]] = set()  # hangs that were returned and are not over
        self._since: Dict[Tuple[str, int], float] = {}  # (kind, pid or rank): since when it holds
        self._mains: Dict[int, Tuple[int, Stat]] = {}  # rank: its main process
        self._ranks: Dict[int, int] = {}  # pid: rank, of all processes of ranks
        self._carried = False  # some processes have a rank, so the command itself is not one
        self._below: Set[Tuple[int, str]] = set()  # processes that were seen below a rank
        self._looked: Optional[float] = None

    @property
    def phase(self) -> str:
        """The phase of the run, one of ``silence.NAMES``."""
        return self._silence.phases.current

    def notices(self) -> List[str]:
        """The new notices since the last call."""
        found, self._notices = self._notices, []
        return found

    def line(self, rank: Optional[int], text: str, now: float) -> None:
        """Take a line of a rank, or of the launcher (None)."""
        self._silence.line(rank, text, now)

    def bytes(self, _rank: Optional[int], count: int, now: float) -> None:
        """Record that a log grew by ``count`` bytes: a progress bar is not a line until it ends."""
        if count > 0:
            self._silence.last_sign = now

    def progress(self, event: Dict[str, Any], now: float) -> None:
        """Take the fields of a progress event."""
        self._silence.progress(event, now)

    def look(self, members: Dict[int, Stat], now: float) -> Optional[Hang]:
        """Look for a hang. ``members`` are the run's living processes. Returns each hang once, until it is over."""
        if self._looked is None or now - self._looked > ASLEEP:
            self._silence.start(now)
            self._since.clear()
        self._looked = now
        self._know(members)
        return self._stopped(members, now) or self._dead(members, now) or self._silent(members, now)

    def _know(self, members: Dict[int, Stat]) -> None:
        """Find the ranks' main processes."""
        self._ranks = of_ranks(members, self._proc.rank)
        self._proc.forget(members)
        self._below &= {(pid, stat.start) for pid, stat in members.items()}
        self._carried = self._carried or bool(self._ranks)
        found = main_processes(members, self._ranks, None if self._carried else self._first, self._below)
        self._below |= {(pid, members[pid].start) for pid in self._ranks if pid not in found.values()}
        self._mains.update({rank: (pid, members[pid]) for rank, pid in found.items()})
        self._ranks.update({pid: rank for rank, pid in found.items()})

    def _fresh(self, pid: int, start: str) -> Optional[Stat]:
        """The current state of a process, also of a zombie: ``members`` may be some seconds old."""
        stat = self._proc.stat(pid)
        return stat if stat is not None and stat.start == start else None

    def _lasts(self, kind: str, key: int, so: bool, now: float) -> float:
        """How long a state has lasted; -1 when it does not hold."""
        if not so:
            self._since.pop((kind, key), None)
            return -1
        return now - self._since.setdefault((kind, key), now)

    def _once(self, hang: Hang) -> Optional[Hang]:
        if (hang.kind, hang.rank) in self._reported:
            return None
        self._reported.add((hang.kind, hang.rank))
        return hang

    def _passed(self, kind: str, rank: Optional[int], text: str) -> None:
        if (kind, rank) in self._reported:
            self._reported.discard((kind, rank))
            self._notices.append(text)

    def _stopped(self, members: Dict[int, Stat], now: float) -> Optional[Hang]:
        self._since = {key: at for key, at in self._since.items() if key[0] != "stopped" or key[1] in self._ranks}
        held: Dict[int, Hang] = {}
        for pid, rank in sorted(self._ranks.items()):
            main = self._mains[rank][0] == pid if rank in self._mains else False
            stat = (self._fresh(pid, members[pid].start) if main else None) or members[pid]
            if main:
                self._waits(rank, pid, stat, now)
            if self._lasts("stopped", pid, stat.state in "Tt", now) >= STOPPED:
                who = "rank %d (pid %d)" % (rank, pid) if main else "process %d of rank %d" % (pid, rank)
                why = "stopped (SIGSTOP, state T)" if stat.state == "T" else "held by a debugger (state t)"
                if main or rank not in held:
                    held[rank] = Hang("stopped", rank, "%s is %s" % (who, why))
        for rank in set(self._ranks.values()) - set(held):
            self._passed("stopped", rank, "rank %d is running again" % rank)
        return next((hang for hang in map(self._once, held.values()) if hang), None)

    def _waits(self, rank: int, pid: int, stat: Stat, now: float) -> None:
        lasts = self._lasts("waiting", pid, stat.state == "D", now)
        if lasts >= WAITING and ("waiting", rank) not in self._reported:
            self._reported.add(("waiting", rank))  # only once: a slow disk would fill the log
            where = self._proc.wchan(pid)
            text = "rank %d (pid %d) has waited for a disk or a device for a minute" % (rank, pid)
            self._notices.append(text + (" (in the kernel: %s)" % where if where else ""))

    def _dead(self, members: Dict[int, Stat], now: float) -> Optional[Hang]:
        """Find a rank that exited while its launcher is running. The supervisor handles a launcher that exits.

        A zombie shows how it died. A reaped process may have exited normally, as ranks do at the end without waiting
        for the others. That is a hang only during announced training, and if no further step arrives.
        """
        now_of = {rank: self._fresh(pid, known.start) for rank, (pid, known) in self._mains.items()}
        living = {rank for rank, stat in now_of.items() if stat is not None and stat.state not in "ZX"}
        training = self._silence.phases.announces and self.phase == TRAINING and bool(living)
        for rank, (pid, known) in sorted(self._mains.items()):
            stat = now_of[rank]
            status = stat.status if stat is not None and rank not in living else 0
            launcher = members.get(known.parent)
            minds = launcher is None or self._fresh(known.parent, launcher.start) is None
            gone = rank not in living and not minds and (status != 0 or training)
            since = now - self._lasts("dead", rank, gone, now)
            stepped = self._silence.stepped
            if not gone or now - since < STOPPED or (status == 0 and stepped is not None and stepped > since):
                continue
            how = " (%s)" % _cause(status) if status else ""
            hang = self._once(
                Hang("dead", rank, "rank %d (pid %d) exited%s, but other ranks are running" % (rank, pid, how))
            )
            if hang:
                return hang
        return None

    def _silent(self, members: Dict[int, Stat], now: float) -> Optional[Hang]:
        why = self._silence.judge(members, now) if self._judges else None
        if why:
            return self._once(Hang("no progress", None, why))
        self._passed("no progress", None, "the run makes progress again")
        return None


def _cause(status: int) -> str:
    """Describe how a process died, from its wait status."""
    if not os.WIFSIGNALED(status):
        return "exit code %d" % os.WEXITSTATUS(status)
    try:
        return signal.Signals(os.WTERMSIG(status)).name
    except ValueError:
        return "signal %d" % os.WTERMSIG(status)


GATHER = 12.0  # seconds for the stacks of all nodes
STACK = 20_000  # characters of each stack in the event


class Hangs:
    """The hangs of one attempt on one node."""

    def __init__(self, plan: NodePlan, watch: Watch, tracker: ProcessTracker, control: Control, events: Events) -> None:
        self._plan, self._watch, self._tracker, self._control, self._events = plan, watch, tracker, control, events
        self._stops = plan.data.hang.policy == "stop"
        self._others = set(plan.data.link.nodes if plan.data.link else ()) - {plan.node}
        self._hang: Optional[Hang] = None
        self._until = 0.0
        self._own: Optional[Dict[int, str]] = None
        self._collecting: Optional[threading.Thread] = None

    def look(self, now: float) -> None:
        """Look for a hang, or continue with the current one."""
        found = self._watch.look(self._tracker.known, now)
        for text in self._watch.notices():
            self._events.emit("notice", text=text)
        if self._control.stacks_wanted and self._hang is None:
            self._control.stacks_wanted = False
            self._collect(send=True)
        if found is not None and self._hang is None:
            self._hang, self._until, self._own = found, now + GATHER, None
            self._control.stacks.clear()
            self._control.answers.clear()
            self._control.link.send("stacks?")
            self._collect(send=False)
        if self._hang is not None and (now >= self._until or self._gathered()):
            hang, self._hang = self._hang, None
            self._act(hang)

    def _gathered(self) -> bool:
        return self._own is not None and self._others <= set(self._control.answers)

    def _collect(self, send: bool) -> None:
        """Collect this node's stacks in a thread, one at a time."""
        if self._collecting is not None and self._collecting.is_alive():
            return
        members = dict(self._tracker.known)

        def work() -> None:
            collected = collect_stacks(members, self._plan.data.first_rank, self._plan.data.prefix)
            found = {rank: text[:STACK] for rank, text in collected.items()}
            if send:
                self._control.link.send("stacks", rank_stacks=found)
            self._own = found
            self._control.nudge()

        self._collecting = threading.Thread(target=work, name="stacks", daemon=True)
        self._collecting.start()

    def _act(self, hang: Hang) -> None:
        found = dict(self._control.stacks)
        found.update(self._own or {})
        text = hang.text
        others = [rank for rank in outliers(found) if rank != hang.rank]
        if hang.rank is None and others:
            text += "; elsewhere than the others: rank %s" % ", ".join(map(str, others))
        fields: Dict[str, Any] = {"kind": hang.kind, "rank": hang.rank, "text": text}
        if found:
            fields["stacks"] = {str(rank): stack for rank, stack in sorted(found.items())}
        self._events.emit("hang", **fields)
        if self._stops:
            self._control.fail(hang.rank if hang.rank is not None or len(others) != 1 else others[0], "hangs: " + text)


PATIENCE = 7.0  # seconds for the stacks of all ranks together; all of this stays below GATHER
AGAIN = 3.0  # seconds for processes that could not be paused
DYING = 0.4  # seconds for py-spys that were killed
STOPPED_STATE = "state T"  # the end of a text's first line if its process is stopped

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
    ours = os.path.join(prefix or "/nonexistent", "bin", "py-spy")  # noqa: PTH118
    return ours if os.access(ours, os.X_OK) else shutil.which("py-spy")


def collect_stacks(members: Dict[int, Stat], first: int, prefix: str) -> Dict[int, str]:
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
        held = {rank for rank, head in heads.items() if head.endswith(STOPPED_STATE)}  # it cannot be paused
        found = _dump(spy, {rank: pid for rank, pid in pids.items() if rank not in held}, [], PATIENCE)
        rest = {rank: pid for rank, pid in pids.items() if rank not in found}
        found.update(_dump(spy, rest, ["--nonblocking"], AGAIN))
    return {rank: "%s\n%s" % (heads[rank], found.get(rank) or of_proc(pid)) for rank, pid in sorted(pids.items())}


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
    stopped = [rank for rank, text in texts.items() if text.partition("\n")[0].endswith((STOPPED_STATE, "gone"))]
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
