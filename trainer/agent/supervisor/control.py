"""Collects what ends a run from outside of an attempt: signals, the guard's end, stop requests, other agents.

Every source wakes one pipe, so one selector waits for all of them. ``take`` turns what arrived into ``stop`` and
``failure``; only the first of each counts.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

from ..contract.statuses import ANSWER, QUESTION
from ..contract.untrusted import finite, whole
from ..run_files import Events, NodePlan, read_request

COPYING = ("saved", "copy", "copied", "kept")  # kinds of messages, see ``keeping/keeper.py``
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNAL = "signal "  # start of ``Stop.who``, if it was a signal
ECHO = 1.0  # seconds between the SIGTERM of a rank and that of its agent
LOST_AFTER = 60.0  # seconds of silence, where the plan has no limit

# Limits for other agents' messages:
TEXT = 2000  # characters of a reason
WORD = 200  # of a name
STACK = 20_000  # of the stacks of one rank
STACKS = 1 << 16  # ranks
DIGITS = 7  # of a rank
PEER_EVENTS = 200  # about another agent in one attempt
YEAR = 366 * 86400.0


class Stop(NamedTuple):
    """A stop request: whether to save a checkpoint first, and who requested it."""

    save: bool
    who: str


class Control:
    """See the module. ``link`` is set when the link exists."""

    def __init__(self, plan: NodePlan, events: Events, guard: Optional[int] = None) -> None:
        self.stop: Optional[Stop] = None
        self.failure: Optional[Dict[str, Any]] = None  # the first known one of this attempt
        self.stack_wanted: Optional[int] = None  # a straggler's rank
        self.stacks_wanted: Dict[int, bool] = {}  # ranks of the agents that asked for the stacks of this node
        self.stacks: Dict[int, str] = {}  # of other nodes' ranks
        self.answers: Dict[str, bool] = {}  # nodes that have sent their stacks
        self.rounds: Dict[str, Dict[str, Any]] = {}  # other nodes' newest signals, see ``rounds.py``
        self.last_progress = time.monotonic()  # when the run was last seen to make progress
        self.last_traffic = 0.0  # when its traffic was last seen, for runs without a log of steps
        self.link: Any = None
        self._statuses: Any = None  # see ``_status``
        self.account: Any = None  # takes the accounts of the first and the last node, see ``spent.py``
        self.keeping: Optional[Callable[[Dict[str, Any]], None]] = None  # takes messages about copies
        self.missing: Set[str] = set()  # nodes whose agents exited or are silent
        self.requests = 0  # stop requests that came to this node itself, from another program; a signal counts twice
        self.broken = False  # the link failed here, so no meeting is possible
        # The nodes that have ranks, none before the meeting has chosen them; None: all. Only they can fail an attempt.
        self.members: Optional[Set[str]] = None
        self.spares = 0  # nodes that can replace one
        self.first = 0  # the position of rank 0's node in the roster
        self.last = plan.data.nnodes - 1  # that of the last rank's
        self._plan = plan
        self._events = events
        self.guard_pid = os.getppid() if guard is not None else None
        self._guard = guard  # a pipe that closes when the guard exits
        self._silent: Dict[str, float] = {}  # nodes without heartbeats: since when
        self.all_nodes = plan.data.link.nodes if plan.data.link else (plan.node,)
        self._nodes = set(self.all_nodes)
        self._event_counts: Dict[str, int] = {}  # events about each node in this attempt
        self._waits: Dict[str, bool] = {}  # a notice reported that the run continues without their heartbeats
        self._lost_after = plan.data.link.lost_after if plan.data.link else LOST_AFTER
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)

    def open(self) -> None:
        """Catch signals. Only the main thread may call this."""
        for number in (*STOPPING, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def close(self) -> None:
        """Close the pipe; ``nudge`` does nothing from then on. Only the main thread may call this."""
        signal.set_wakeup_fd(-1)
        ends, self._wake, self._waker = (self._wake, self._waker), -1, -1
        for end in ends:
            os.close(end)

    def nudge(self) -> None:
        """Wake the selector; from any thread."""
        with contextlib.suppress(OSError):  # it is full, so the reader is about to wake; or closed
            os.write(self._waker, b"\0")

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with a selector; the keys' data is the function to call."""
        selector.register(self._wake, selectors.EVENT_READ, self.take)
        if self._guard is not None:
            selector.register(self._guard, selectors.EVENT_READ, self.take)

    def wait(self, seconds: float) -> bool:
        """Wait for a message and take it. False after ``seconds`` without one."""
        with selectors.DefaultSelector() as selector:
            self.register(selector)
            ready = selector.select(max(0.0, seconds))
        self.take()
        return bool(ready)

    def relinked(self) -> None:
        """Forget who was silent, and repeat what the old hub may not have sent: the link has another hub."""
        self._silent.clear()
        self._waits.clear()
        self.missing.clear()
        if self.stop is not None:
            self.link.send("stop", save=self.stop.save, who=self.stop.who)
        if self.failure is not None:
            told = {key: self.failure[key] for key in ("text", "signal")}
            about = self.failure["node"]
            self.link.send("failed", attempt=self._events.attempt, failed=self.failure["rank"], about=about, **told)

    def wait_for_stop(self) -> None:
        """Wait a moment for a stop.

        Slurm and a shutdown send SIGTERM to every process, and a rank may die of it before this process takes its own.
        Launchers, which get it too, end with other codes.
        """
        until = time.monotonic() + ECHO
        while not self.over() and time.monotonic() < until:
            self.wait(until - time.monotonic())

    def begin(self) -> None:
        """Start a new attempt: forget the last one's failure."""
        self.failure = None
        self.last_progress = time.monotonic()
        self._waits.clear()
        self._event_counts.clear()

    def over(self) -> bool:
        """Whether the attempt must end here."""
        return self.stop is not None or self.failure is not None

    def take(self, _: int = -1) -> bool:
        """Take everything that arrived. Always true, so that it stays registered."""
        numbers = set()
        with contextlib.suppress(BlockingIOError):
            numbers = set(os.read(self._wake, 4096))
        for number in numbers & set(STOPPING):
            self.requests += 2
            self.request_stop(Stop(False, "%s%s%s" % (SIGNAL, signal.Signals(number).name, _slurm_job())))
        if signal.SIGUSR1 in numbers:
            request = read_request(self._plan.logs)
            if request is not None:
                self.requests += 1
                self.request_stop(Stop(bool(request.get("save")), str(request.get("who") or "an unknown user")))
        if signal.SIGUSR2 in numbers:
            self._status().asked_here()
        if self._guard is not None and _ended(self._guard):
            self._guard = self.guard_pid = None
            self.fail(None, "the agent's guard was killed")
        for message in self.link.take() if self.link is not None else ():
            self._message(message)
        return True

    def request_stop(self, stop: Stop, relay: bool = True) -> None:
        """Record a stop request. A stop without saving replaces one that saves."""
        if self.stop is None or (self.stop.save and not stop.save):
            self.stop = stop
            how = ", after saving a checkpoint" if stop.save else ""
            self._events.emit("notice", level="info", text="%s requested a stop%s" % (stop.who, how))
            if relay and self.link is not None:
                self.link.send("stop", save=stop.save, who=stop.who)

    def fail(
        self,
        rank: Optional[int],
        text: str,
        node: Optional[str] = None,
        *,
        signal: Optional[str] = None,
        condemned: bool = False,
    ) -> None:
        """Record a failure. The first one is sent to all nodes; what a stop causes is not a failure.

        ``signal``: the name of the signal that ended the rank. ``condemned``: see ``condemn``.
        """
        if self.failure is None and self.stop is None:
            own = node is None
            node = node or self._plan.node
            self.failure = {"node": node, "rank": rank, "text": text, "signal": signal, "time": round(time.time(), 3)}
            self.failure.update({"condemned": True} if condemned else {})
            if own and self.link is not None:
                self.link.send("failed", attempt=self._events.attempt, failed=rank, text=text, signal=signal)

    def condemn(self, node: str, text: str) -> None:
        """End the attempt because of a node on which nothing failed: a spare takes its place in the next one."""
        if self.failure is None and self.stop is None:
            self.fail(None, text, node, condemned=True)
            self.link.send("failed", attempt=self._events.attempt, text=text, about=node, condemned=True)

    def look(self, now: float) -> None:
        """Judge the nodes without heartbeats."""
        for node, since in list(self._silent.items()):
            silent = now - since
            if silent <= self._lost_after or not self.takes_part(node):
                continue
            # A short outage of the management network must not end a run that continues over another network.
            if now - max(self.last_progress, self.last_traffic) > self._lost_after:
                self.fail(None, "no heartbeat for %d s, and the run makes no progress" % silent, node)
            elif not self._waits.get(node):
                self._waits[node] = True
                text = "no heartbeat from %s for %d s, but the run makes progress and continues" % (node, silent)
                self._events.emit("notice", text=text)

    def failed_here(self) -> bool:
        """Whether the first failure of the attempt is this node's own."""
        return self.failure is not None and self.failure["node"] == self._plan.node

    def takes_part(self, node: str) -> bool:
        """Whether the node has ranks in the current attempt."""
        return self.members is None or node in self.members

    def lost_nodes(self) -> List[str]:
        """Nodes that have been silent for too long."""
        now = time.monotonic()
        return [node for node, since in self._silent.items() if now - since > self._lost_after]

    def _message(self, message: Dict[str, Any]) -> None:
        """Handle a message of the link. Values of a wrong type are ignored."""
        kind, node = message.get("kind"), _text(message.get("node"), WORD)
        if kind == "broken":
            self.broken = True
            self.fail(None, "the link between the agents failed: %s" % message.get("text"))
        elif kind == "refused":
            self.fail(None, "%s refuses this agent: %s" % (node, _text(message.get("text"))))
        elif node not in self._nodes:
            return
        elif kind == "stop":
            self.request_stop(Stop(message.get("save") is True, _text(message.get("who"), WORD)), relay=False)
        elif kind == "failed" and message.get("attempt", self._events.attempt) == self._events.attempt:
            text, signal = _text(message.get("text")), message.get("signal")
            about = _text(message.get("about"), WORD)
            node = about if about in self._nodes else node
            self._peer(node, kind, text)
            if self.takes_part(node):
                signal = None if signal is None else _text(signal, WORD)
                condemned = message.get("condemned") is True
                self.fail(_rank(message.get("failed")), text, node, signal=signal, condemned=condemned)
        else:
            self._handle(kind, node, message)

    def _handle(self, kind: Any, node: str, message: Dict[str, Any]) -> None:
        """Handle a message about the state of another agent, or about its node's files, signals and stacks."""
        if kind in ("gone", "lost") and self.keeping is not None:
            self.keeping(message)
        if kind == "gone":
            self._peer(node, kind, "its agent exited")
            self.missing.add(node)
            if self.takes_part(node):
                self.fail(None, "its agent died without reporting", node)
        elif kind == "lost":
            silent = _seconds(message.get("silent"))
            self._peer(node, kind, "no heartbeat for %s s" % silent)
            self._silent[node] = time.monotonic() - silent
            self.missing.add(node)
        elif kind == "back":
            self._peer(node, kind, "heartbeats arrive again")
            self._silent.pop(node, None)
            self._waits.pop(node, None)
            self.missing.discard(node)
        elif kind == "ended":
            self._peer(node, kind, _text(message.get("text") or ""))
        elif kind in COPYING and self.keeping is not None:
            self.keeping(message)
        else:
            self._report(kind, node, message)

    def _report(self, kind: Any, node: str, message: Dict[str, Any]) -> None:
        """Handle a message about signals and stacks of another node's ranks, or about the time of the run."""
        if kind == "round":
            self.rounds[node] = message
        elif kind == "spent" and self.account is not None:
            if node in (self.all_nodes[self.first], self.all_nodes[self.last]):
                self.account.hear(node, message.get("spent"))
        elif kind == "stack?":
            self.stack_wanted = _rank(message.get("straggler"))
        elif kind == "stacks?":
            asking = _rank(message.get("rank"))
            if asking is not None:
                self.stacks_wanted[asking] = True
        elif kind in (QUESTION, ANSWER):
            self._take_status(kind, node, message)
        elif kind == "stacks":
            self.answers[node] = True
            self._take_stacks(message.get("rank_stacks"))

    def _take_status(self, kind: str, node: str, message: Dict[str, Any]) -> None:
        """Handle another agent's question for this node's status, or its answer to one of this agent."""
        position, number = _rank(message.get("rank")), _rank(message.get("number"))
        if position is None or number is None:
            return
        if kind == QUESTION:
            self._status().asked(position, number)
        else:
            self._status().take(node, number, message)

    def _status(self) -> Any:
        """This agent's part of ``agent statuses``. Imported when it is first asked: few runs need it."""
        if self._statuses is None:
            from ..statuses import Statuses  # noqa: PLC0415

            self._statuses = Statuses(self._plan, self._send)
        return self._statuses

    def _send(self, kind: str, **fields: Any) -> None:
        if self.link is not None:
            self.link.send(kind, **fields)

    def _take_stacks(self, stacks: Any) -> None:
        for rank, text in stacks.items() if isinstance(stacks, dict) else ():
            if rank.isdigit() and rank.isascii() and len(rank) <= DIGITS and len(self.stacks) < STACKS:
                self.stacks[int(rank)] = _text(text, STACK)

    def _peer(self, node: str, kind: Any, text: str) -> None:
        """Write an event about another agent, but not so many that a broken one fills the disk."""
        self._event_counts[node] = self._event_counts.get(node, 0) + 1
        if self._event_counts[node] <= PEER_EVENTS:
            self._events.emit("peer", node=node, state=kind, text=text)


def _slurm_job() -> str:
    """The Slurm job that this process is part of, which ends its processes by signals."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return " of Slurm job %s" % job[: DIGITS * 2] if job else ""


def _text(value: Any, most: int = TEXT) -> str:
    """A limited text that can be written to a file."""
    return str(value)[:most].encode("utf-8", "replace").decode("utf-8")


def _rank(value: Any) -> Optional[int]:
    return whole(value, 10**DIGITS)


def _seconds(value: Any) -> float:
    """Seconds of silence; 0 for an invalid value."""
    return finite(value, YEAR, 0.0) or 0.0


def _ended(fd: int) -> bool:
    """Whether a pipe is closed at the other end; nothing is ever written to it."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False
