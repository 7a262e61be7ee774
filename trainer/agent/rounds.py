"""Joins the signals of all nodes into rounds on rank 0, and reports the straggler (``stragglers.py``).

Every agent closes a round every ``ROUND`` seconds and sends its ranks' signals to rank 0. Rank 0 joins the newest ones
of all nodes when its own round ends. So clocks need not agree. The rounds of two nodes may be a round apart: a
straggler lasts longer than that.

A round counts only if the run trained in all of it and its steps arrived at their usual pace: while rank 0 saves a
checkpoint or evaluates, the others rightly wait.
"""

from __future__ import annotations

import collections
import math
import threading
import time
from typing import Any, Callable, Deque, Dict, List, Optional, Tuple

from . import stacks
from .contract.plan import Plan
from .metrics import append
from .run_files import Events, NodePlan, State
from .signals import Signals
from .silence import TRAINING
from .stragglers import Case, Gpu, Rank, Round, Track, advance, consider, median, over, sentence
from .supervisor.control import Control
from .tracker import ProcessTracker

ROUND = 20.0  # seconds
VARIABLE = "CLUSTERCTL_STRAGGLER_ROUND"  # of the run: other seconds; 0: look for no stragglers
PACES = 50  # times between steps that are kept
STANDSTILL = 3  # times the usual time between two steps
LIMIT = 16 << 20  # bytes of rounds.jsonl and the older part together: a day of 16 ranks
STACK = 20_000  # characters of a straggler's stack
STACK_AFTER = 60.0  # seconds between two of them: another agent asks for them
_RANKS = 1 << 16
_MOST = 1e6  # MHz, watts


def round_seconds(plan: Plan) -> float:
    """The seconds of a round; 0 where there is nothing to compare."""
    if plan.nnodes * plan.processes < 2:
        return 0.0
    try:
        seconds = float(plan.env.get(VARIABLE, ROUND))
    except ValueError:
        return ROUND
    return seconds if 0 < seconds < 3600 else 0.0


class Steps:
    """The times of the steps of a run, and whether they arrive at their usual pace. ``now`` is a monotonic clock."""

    def __init__(self) -> None:
        self._at: Optional[float] = None
        self._times: Deque[float] = collections.deque(maxlen=PACES)

    def step(self, at: Optional[float]) -> None:
        """Take the time of the last step; the same one may come again."""
        if at is None or at == self._at:
            return
        if self._at is not None:
            self._times.append(at - self._at)
        self._at = at

    def steady(self, now: float, round_: float) -> bool:
        """Whether the last step is not too long ago."""
        if self._at is None or len(self._times) < 2:
            return False
        return now - self._at <= max(STANDSTILL * median(self._times), min(round_, 5.0))


class Stragglers:
    """The rounds of one attempt on one node. ``saved`` identifies the newest checkpoint, None without one."""

    def __init__(
        self,
        plan: NodePlan,
        tracker: ProcessTracker,
        control: Control,
        events: Events,
        state: State,
        saved: Callable[[], Any] = lambda: None,
    ) -> None:
        self._plan, self._tracker, self._control, self._events, self._state = plan, tracker, control, events, state
        self._round = round_seconds(plan.data)
        self._due: Optional[float] = None
        self._signals = Signals()
        self._track = Track()
        self._case = Case()
        self._saved = saved
        self._steps = Steps()
        self._trained = True  # in all of this round
        self._last: Dict[str, Any] = {}  # reports of the last round, by node
        self._stack: Optional[Dict[str, Any]] = None  # of a straggler, for the next event
        self._sampled: Optional[float] = None  # when the last one was taken
        control.rounds.clear()

    def gpus(self, values: Optional[List[Dict[str, Any]]]) -> None:
        """Take a sample of the GPUs."""
        if self._round:
            self._signals.gpus(values)

    def look(self, phase: str, stepped: Optional[float], now: float) -> None:
        """Close the round, if it is over. ``stepped``: when the last step was seen."""
        if not self._round or not self._tracker.ranks:
            return
        try:
            self._look(phase, stepped, now)
        except Exception as error:  # noqa: BLE001 - a fault here must not end a training
            self._round = 0.0
            self._signals.close()
            text = "stragglers are no longer looked for: %s: %s" % (type(error).__name__, error)
            self._events.emit("notice", text=text)

    def _look(self, phase: str, stepped: Optional[float], now: float) -> None:
        self._sample(now)
        self._steps.step(stepped)
        self._signals.watch(dict(self._tracker.ranks), self._tracker.known)
        self._trained = self._trained and phase == TRAINING and self._steps.steady(now, self._round)
        if self._due is not None and now < self._due:
            return
        first, self._due = self._due is None, now + self._round
        report = self._signals.close_round()
        if first:
            return
        if self._plan.rank != 0:
            self._control.link.send("round", to=self._control.first, **report)
            return
        trained, self._trained = self._trained, True
        new = dict(self._control.rounds, **{self._plan.node: report})
        self._control.rounds.clear()
        late, self._last = self._last, new  # a report may arrive just after its round
        if trained:
            self._judge(join({**late, **new}))

    def _sample(self, now: float) -> None:
        """Take the stack of a straggler on this node once, in a thread, and write it when it is there."""
        found, self._stack = self._stack, None
        if found is not None:
            self._events.emit("stack", **found)
        rank, self._control.stack_wanted = self._control.stack_wanted, None
        recent = self._sampled is not None and now - self._sampled < STACK_AFTER
        if rank is None or recent or rank not in self._tracker.ranks.values():
            return
        self._sampled = now
        members, plan = dict(self._tracker.known), self._plan.data

        def work() -> None:
            text = stacks.of_rank(rank, members, plan.first_rank, plan.prefix)
            if text:
                at = stacks.where(text) or "an unknown place"
                self._stack = {"rank": rank, "text": "rank %d was in %s" % (rank, at), "stack": text[:STACK]}

        threading.Thread(target=work, name="stack", daemon=True).start()

    def close(self) -> None:
        """End the collection."""
        self._signals.close()

    def _judge(self, new: Round) -> None:
        append(str(self._plan.logs / "rounds.jsonl"), dict(to_object(new), time=round(time.time(), 3)), LIMIT)
        self._track, news = advance(self._track, new)
        for verdict, slow in news:
            text = sentence(verdict) if slow else over(verdict)
            self._state.set(straggler=text if slow else None)
            self._events.emit(
                "straggler",
                state="slow" if slow else "over",
                kind=verdict.cause,
                rank=verdict.rank,
                node=verdict.node,
                by=round(verdict.by, 3),
                text=text,
            )
            if slow:
                self._control.stack_wanted = verdict.rank
                self._control.link.send("stack?", straggler=verdict.rank)
        self._case, replace = consider(self._case, self._track, self._saved())
        if replace and self._control.spares and self._case.verdict is not None:
            self._control.condemn(self._case.verdict.node, sentence(self._case.verdict))


def to_object(one: Round) -> Dict[str, Any]:
    """A round as JSON values: the joined reports, by node."""
    nodes: Dict[str, Dict[str, Any]] = {}
    for rank, each in sorted(one.ranks.items()):
        values = dict(each._asdict(), gpu=each.gpu._asdict() if each.gpu else None)
        nodes.setdefault(values.pop("node"), {})[str(rank)] = values
    return {"nodes": nodes, "queues": [[*pair, share] for pair, share in sorted(one.queues.items())]}


def from_object(value: Dict[str, Any]) -> Round:
    """Read a round of ``rounds.jsonl``."""
    ranks = {int(rank): _rank(node, values) for node, found in value["nodes"].items() for rank, values in found.items()}
    return Round(ranks, {(one, to): _share(share) for one, to, share in value["queues"]})


def join(reports: Dict[str, Any]) -> Round:
    """The round of all nodes, from what their agents sent, by the nodes' names. Skips invalid values."""
    ranks: Dict[int, Rank] = {}
    nodes: Dict[str, str] = {}
    for node, report in reports.items():
        for address in _list(report.get("addresses")):
            if isinstance(address, str):
                nodes[address[:32]] = node
        for name, values in _dict(report.get("ranks")).items():
            if (
                name.isdigit()
                and name.isascii()
                and len(name) <= 7
                and len(ranks) < _RANKS
                and isinstance(values, dict)
            ):
                ranks[int(name)] = _rank(node, values)
    queues: Dict[Tuple[str, str], float] = {}
    for node, report in reports.items():
        for address, share in _dict(report.get("queues")).items():
            to = nodes.get(address)
            if to is not None and to != node:
                queues[node, to] = max(queues.get((node, to), 0.0), _share(share))
    return Round(ranks, queues)


def _rank(node: str, values: Dict[str, Any]) -> Rank:
    gpu = values.get("gpu")
    shares = {name: _share(values.get(name)) for name in ("run", "delay", "data", "disk", "stall", "quota")}
    return Rank(node=node, gpu=_gpu(gpu) if isinstance(gpu, dict) else None, **shares)


def _gpu(values: Dict[str, Any]) -> Gpu:
    numbers = {name: _number(values.get(name), _MOST) for name in ("use", "power", "clock")}
    memory = _number(values.get("memory"), float(1 << 50))
    return Gpu(memory=memory, slowed=_share(values.get("slowed")), foreign=_share(values.get("foreign")), **numbers)


def _number(value: Any, most: float) -> Optional[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0 <= value <= most else None


def _share(value: Any) -> float:
    number = _number(value, 1.0)
    return 0.0 if number is None else number


def _dict(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> List[Any]:
    return value if isinstance(value, list) else []
