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
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import stacks
from .contract.plan import Plan
from .processes import Proc, Stat, main_processes, of_ranks
from .run_files import Events, NodePlan
from .silence import TRAINING, Silence
from .supervisor.control import Control
from .tracker import ProcessTracker

if TYPE_CHECKING:
    from .reader import Reading

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

    @property
    def saves(self) -> int:
        """How often the run began to save."""
        return self._silence.phases.saves

    @property
    def stepped(self) -> Optional[float]:
        """When the last step was seen; None before the first."""
        return self._silence.stepped

    def notices(self) -> List[str]:
        """The new notices since the last call."""
        found, self._notices = self._notices, []
        return found

    def line(self, _rank: Optional[int], text: str, now: float) -> None:
        """Take a line of a rank, or of the launcher (None)."""
        self._silence.line(text, now)

    def bytes(self, _rank: Optional[int], count: int, now: float) -> None:
        """Record that a log grew by ``count`` bytes: a progress bar is not a line until it ends."""
        if count > 0:
            self._silence.last_sign = now

    def reading(self, rank: Optional[int], reading: "Reading", now: float) -> None:
        """Take numbers in the output of a rank, or of the launcher (None)."""
        self._silence.reading(rank, reading, now)

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
            asking, self._control.stacks_wanted = list(self._control.stacks_wanted), {}
            self._collect(asking)
        if found is not None and self._hang is None:
            self._hang, self._until, self._own = found, now + GATHER, None
            self._control.stacks.clear()
            self._control.answers.clear()
            self._control.link.send("stacks?")
            self._collect()
        if self._hang is not None and (now >= self._until or self._gathered()):
            hang, self._hang = self._hang, None
            self._act(hang)

    def _gathered(self) -> bool:
        return self._own is not None and self._others <= set(self._control.answers)

    def _collect(self, asking: Sequence[int] = ()) -> None:
        """Collect this node's stacks in a thread, one at a time, and send them to the agents that asked."""
        if self._collecting is not None and self._collecting.is_alive():
            return
        members = dict(self._tracker.known)

        def work() -> None:
            collected = stacks.collect(members, self._plan.data.first_rank, self._plan.data.prefix)
            found = {rank: text[:STACK] for rank, text in collected.items()}
            for rank in asking:
                self._control.link.send("stacks", to=rank, rank_stacks=found)
            self._own = found
            self._control.nudge()

        self._collecting = threading.Thread(target=work, name="stacks", daemon=True)
        self._collecting.start()

    def _act(self, hang: Hang) -> None:
        found = dict(self._control.stacks)
        found.update(self._own or {})
        text = hang.text
        others = [rank for rank in stacks.outliers(found) if rank != hang.rank]
        if hang.rank is None and others:
            text += "; elsewhere than the others: rank %s" % ", ".join(map(str, others))
        fields: Dict[str, Any] = {"kind": hang.kind, "rank": hang.rank, "text": text}
        if found:
            fields["stacks"] = {str(rank): stack for rank, stack in sorted(found.items())}
        self._events.emit("hang", **fields)
        if self._stops:
            self._control.fail(hang.rank if hang.rank is not None or len(others) != 1 else others[0], "hangs: " + text)
