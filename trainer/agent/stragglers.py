"""Names the rank that the others wait for, from rounds of signals of all ranks. Pure functions over frozen data.

All ranks finish a step together, so their step times are equal, whichever is slow. What differs is how they spend the
step: the slow rank works, and the others wait for it. Five measures show this, each with its *lead*: how far a rank is
ahead of the median of the others.

=========  ============================================================================================
``clock``  the clock of its GPU is lower
``busy``   its main thread works, waits for a processor, for data or for a disk, while those of others
           wait for another rank. With a GPU only these waits: who waits for a GPU spins, and seems to work
``run``    its main thread runs longer than it used to
``idle``   its GPU has nothing to do, while NCCL's kernels keep those of the others busy
``share``  another process uses its GPU
``power``  its GPU draws its usual power and those of the others less: a waiting NCCL kernel draws little
``queue``  data that its node has sent waits in the sockets to another node
=========  ============================================================================================

A rank is named when its lead is above ``EACH`` in all of the last ``CONSISTENT`` rounds, and above ``MEAN`` on average.

Work may be unequal by nature: a pipeline's stages, rank 0 which logs and saves. So a lead alone does not name a rank.
It also needs a cause that no healthy rank has (its clock is throttled, it waits for a processor, a disk or data), or
its lead must have grown since the first rounds of the training.

``advance`` adds a round, and returns what has changed. Rounds without training (a checkpoint, an evaluation) are not
added: see ``rounds.py``.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

CONSISTENT = 5  # rounds
WARM = 1  # first rounds that do not count: kernels are tuned and compiled
BASE = 10  # rounds after these that show the ranks' usual work
LEAST = 5  # of them that are needed
NOISE = 5.0  # standard errors that are no change: of the hundreds of judgements of a day, one in a million exceeds it

EACH = 0.03  # lead in each of the rounds
MEAN = 0.06  # and on average: of a rank that is 10 % slower, the others wait 9 % of the time
CLOCK_ALONE = (
    0.1  # a change without such a reason: at the power limit, healthy clocks differ by 5 % from second to second
)
SLOWED = 0.5  # part of the samples in which a clock is throttled
WORKING = 0.9  # use of a GPU that works or waits in NCCL
POWER_EACH, POWER_MEAN = 0.015, 0.03  # a waiting GPU draws a third of the power of a working one
QUEUE_ALONE = 0.3  # lead of a full queue that needs no change: an even ring fills all queues alike
SHARED = 256 << 20  # bytes of GPU memory that only another process explains: a CUDA context has more
QUOTA = 0.2  # part of the periods in which a cgroup was throttled

PERSISTENT = 15  # rounds in a row with the same straggler, after which a spare node may replace its node
LOSS = 0.09  # part of the time that others wait for it in each of them: its steps are 10 % longer

CLOCK, CPU, LINK, DISK, DATA, SHARE, COMPUTE = "clock", "cpu", "link", "disk", "data", "shared GPU", "compute"
# What comes from a node, so that the run is faster on another one. Data and uneven work come from the program as well.
NODES_OWN = (CLOCK, CPU, LINK, DISK, SHARE)


class Gpu(NamedTuple):
    """A rank's GPU in a round.

    Mean use (0 to 1), watts, MHz and bytes; the part of the samples in which its clock was throttled; the part of the
    time in which processes of others used it.
    """

    use: Optional[float] = None
    power: Optional[float] = None
    clock: Optional[float] = None
    memory: Optional[float] = None
    slowed: float = 0.0
    foreign: float = 0.0


class Rank(NamedTuple):
    """A rank in a round. Each number without a unit is a part of the round, from 0 to 1.

    Attributes:
        node: its node.
        run: its main thread runs.
        delay: its main thread is ready, and waits for a processor.
        data: its main thread waits for a process or a timer: for the workers of a DataLoader.
        disk: the same, or one of the workers it waits for, for a disk.
        stall: the longest wait for a processor among its threads and workers.
        quota: periods in which its cgroup used up its quota.
        gpu: its GPU; None without one.
    """

    node: str
    run: float = 0.0
    delay: float = 0.0
    data: float = 0.0
    disk: float = 0.0
    stall: float = 0.0
    quota: float = 0.0
    gpu: Optional[Gpu] = None

    @property
    def busy(self) -> float:
        """The part of the round in which it does not wait for other ranks, as far as it is known."""
        return (self.run if self.gpu is None else 0.0) + self.delay + self.data + self.disk


class Round(NamedTuple):
    """The signals of all ranks in one round; ``queues`` are by the names of the sending and the receiving node."""

    ranks: Dict[int, Rank]
    queues: Dict[Tuple[str, str], float] = {}  # noqa: RUF012 - never changed


class Verdict(NamedTuple):
    """The slow rank.

    Attributes:
        rank: the rank; of a node with a slow link, its first.
        node: its node.
        measure: the measure that shows it.
        cause: one of the words below.
        by: the part of the time in which others wait for it.
        detail: what was seen.
        to: the other end of a slow link.
        changed: whether only its change since the first rounds shows it.
    """

    rank: int
    node: str
    measure: str
    cause: str
    by: float
    detail: str
    to: str = ""
    changed: bool = False


class Case(NamedTuple):
    """Whether a node should be replaced because of its slow rank.

    Attributes:
        verdict: the last one.
        rounds: how many in a row had the same node and cause.
        saved: the newest checkpoint when these were enough; the run waits for the next one.
    """

    verdict: Optional[Verdict] = None
    rounds: int = 0
    saved: Any = None

    @property
    def is_proven(self) -> bool:
        """Whether it was slow for long enough."""
        return self.rounds >= PERSISTENT


class Track(NamedTuple):
    """What is known.

    Attributes:
        first: the first rounds of training.
        last: the last ones.
        rounds: how many there were.
        named: the rank that was reported.
        found: the slow rank in ``last``.
    """

    first: Tuple[Round, ...] = ()
    last: Tuple[Round, ...] = ()
    rounds: int = 0
    named: Optional[Verdict] = None
    found: Optional[Verdict] = None


def advance(track: Track, new: Round) -> Tuple[Track, List[Tuple[Verdict, bool]]]:
    """Add a round. Returns the verdicts that are new (true) or over (false)."""
    first = track.first
    # A round is part of the usual work only when it cannot be one of the rounds that are judged.
    if track.rounds >= WARM + CONSISTENT and len(first) < BASE:
        first += track.last[:1]
    last = (*track.last, new)[-CONSISTENT:] if track.rounds >= WARM else ()
    track = Track(first, last, track.rounds + 1, track.named)
    if len(last) < CONSISTENT:
        return track, []
    named, found = track.named, judge(first, last)
    track = track._replace(found=found)
    if named is not None and found is not None and (named.rank, named.cause) == (found.rank, found.cause):
        return track, []
    news = []
    if named is not None and (found is not None or _over(named, first, last)):
        news.append((named, False))
        named = None
    if named is None and found is not None:
        news.append((found, True))
        named = found
    return track._replace(named=named), news


def consider(case: Case, track: Track, saved: Any) -> Tuple[Case, bool]:
    """Add the last round of ``track`` to a case. Returns whether to replace the node now.

    That is right after a checkpoint, so that few steps are repeated: ``saved`` identifies the newest one.
    """
    found = track.found
    if found is None or found.by < LOSS or found.cause not in NODES_OWN:
        return Case(), False
    last = case.verdict
    if last is None or (last.node, last.cause) != (found.node, found.cause):
        return Case(found, 1), False
    if case.is_proven:
        return case._replace(verdict=found), saved != case.saved
    return Case(found, case.rounds + 1, saved), False


def judge(first: Sequence[Round], last: Sequence[Round]) -> Optional[Verdict]:
    """The slow rank in ``last``, the rounds to judge; ``first`` are the rounds with the usual work."""
    for group in _ORDER:
        found = [verdict for measure in group for verdict in _verdicts(measure, first, last)]
        if found:
            return max(found, key=lambda verdict: verdict.by)
    # A rank that is late also reads late what others sent to it: their queues are no evidence against a link.
    late = [_grown(measure, first, last) or _leads(measure, last) for measure in (_BUSY, _IDLE)]
    suspected = any(min(each) >= EACH for leads in late for each in leads.values())
    return None if suspected else _link_verdict(first, last)


def _verdicts(measure: _Measure, first: Sequence[Round], last: Sequence[Round]) -> List[Verdict]:
    leads, grown = _leads(measure, last), _grown(measure, first, last)
    each = [_verdict(measure, first, last, rank, leads[rank], grown.get(rank)) for rank in leads]
    return [verdict for verdict in each if verdict is not None]


class _Measure(NamedTuple):
    name: str
    values: Callable[[Round], Dict[Any, float]]
    each: float
    mean: float
    relative: bool = False


def _clocks(one: Round) -> Dict[int, float]:
    return {
        rank: -each.gpu.clock
        for rank, each in one.ranks.items()
        if each.gpu is not None and each.gpu.clock and each.gpu.use is not None and each.gpu.use >= 0.5
    }


def _idle(one: Round) -> Dict[int, float]:
    used = {rank: each.gpu.use for rank, each in one.ranks.items() if each.gpu is not None and each.gpu.use is not None}
    # Without NCCL's kernels the GPUs of waiting ranks are idle too.
    return {rank: 1 - use for rank, use in used.items()} if used and max(used.values()) >= WORKING else {}


def _power(one: Round) -> Dict[int, float]:
    found = {rank: each.gpu for rank, each in one.ranks.items() if each.gpu is not None}
    if any(gpu.use is None or gpu.use < WORKING for gpu in found.values()):
        return {}
    return {rank: gpu.power for rank, gpu in found.items() if gpu.power}


def _queues(one: Round) -> Dict[str, float]:
    """The fullest queue of each node."""
    found = {each.node: 0.0 for each in one.ranks.values()}
    for (node, _), share in one.queues.items():
        if node in found:
            found[node] = max(found[node], share)
    return found


_CLOCK = _Measure("clock", _clocks, EACH, MEAN, relative=True)
_SHARE = _Measure(
    "share",
    lambda one: {rank: each.gpu.foreign for rank, each in one.ranks.items() if each.gpu is not None},
    EACH,
    MEAN,
)
_BUSY = _Measure("busy", lambda one: {rank: each.busy for rank, each in one.ranks.items()}, EACH, MEAN)
_RUN = _Measure("run", lambda one: {rank: each.run for rank, each in one.ranks.items() if each.gpu is None}, EACH, MEAN)
_IDLE = _Measure("idle", _idle, EACH, MEAN)
_POWER = _Measure("power", _power, POWER_EACH, POWER_MEAN, relative=True)
_QUEUE = _Measure("queue", _queues, EACH, MEAN)
_DISK = _Measure("disk", lambda one: {rank: each.disk for rank, each in one.ranks.items()}, EACH, MEAN)
_DATA = _Measure("data", lambda one: {rank: each.data for rank, each in one.ranks.items()}, EACH, MEAN)
_DELAY = _Measure(
    "delay", lambda one: {rank: max(each.delay, each.stall) for rank, each in one.ranks.items()}, EACH, MEAN
)
_HOST = (_DISK, _DATA, _DELAY)
_ORDER = ((_SHARE,), (_CLOCK,), _HOST, (_RUN,), (_IDLE,), (_POWER,))  # of equals, the largest lead counts
_MEASURES = {each.name: each for each in (*(each for group in _ORDER for each in group), _QUEUE)}


def median(values: Sequence[float]) -> float:
    """The middle of some values."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[-1 - len(ordered) // 2]) / 2


def ahead(values: Dict[Any, float], *, relative: bool = False) -> Dict[Any, float]:
    """How far each value is ahead of the median of the others; empty for fewer than two."""
    ordered = sorted(values.values())
    count = len(ordered) - 1
    found = {}
    for key, value in values.items() if count > 0 else ():
        place = ordered.index(value) if count < 16 else None
        others = ordered if place is None else ordered[:place] + ordered[place + 1 :]
        middle = (others[len(others) // 2] + others[-1 - len(others) // 2]) / 2
        found[key] = (value - middle) / abs(middle) if relative and middle else value - middle
    return found


def _leads(measure: _Measure, rounds: Sequence[Round]) -> Dict[Any, List[float]]:
    """The leads of the ranks that every round has."""
    return _together([ahead(measure.values(one), relative=measure.relative) for one in rounds])


def _grown(measure: _Measure, first: Sequence[Round], last: Sequence[Round]) -> Dict[Any, List[float]]:
    """By how much more the values of the ranks grew than those of the others; empty if too few rounds came before.

    Each rank is compared with itself first. The leads would not do: between the two halves of a pipeline, the median of
    the others jumps.
    """
    before = _together([measure.values(one) for one in first])
    if len(first) < LEAST:
        return {}
    usual = {rank: median(each) for rank, each in before.items()}
    found = []
    for one in last:
        values = {rank: value for rank, value in measure.values(one).items() if rank in usual}
        if measure.relative:
            changes = {rank: (value - usual[rank]) / abs(usual[rank]) for rank, value in values.items() if usual[rank]}
        else:
            changes = {rank: value - usual[rank] for rank, value in values.items()}
        found.append(ahead(changes))
    return _together(found)


def _together(each: Sequence[Dict[Any, float]]) -> Dict[Any, List[float]]:
    """The values of the ranks that are in all rounds."""
    common = set(each[0]).intersection(*each[1:]) if each else set()
    return {rank: [values[rank] for values in each] for rank in sorted(common)}


def _consistent(measure: _Measure, leads: Optional[Sequence[float]]) -> bool:
    return leads is not None and min(leads) >= measure.each and _mean(leads) >= measure.mean


def _changed(measure: _Measure, first: Sequence[Round], key: Any, grown: Optional[Sequence[float]]) -> bool:
    """Whether a change is consistent, and larger than the usual noise."""
    return _consistent(measure, grown) and _mean(grown or ()) >= NOISE * _noise(measure, first, key)


def _noise(measure: _Measure, first: Sequence[Round], rank: Any) -> float:
    """The standard error of a mean of ``CONSISTENT`` changes, from the rounds with the usual work."""
    usual = _grown(measure, first, first).get(rank, ())
    middle = _mean(usual)
    spread = sum((each - middle) ** 2 for each in usual) / max(1, len(usual) - 1)
    return math.sqrt(spread / CONSISTENT)


def _verdict(
    measure: _Measure,
    first: Sequence[Round],
    last: Sequence[Round],
    rank: int,
    leads: Sequence[float],
    grown: Optional[Sequence[float]],
) -> Optional[Verdict]:
    found = Verdict(rank, last[-1].ranks[rank].node, measure.name, "", _mean(leads), "")
    if _consistent(measure, leads):
        cause = _cause_of_lead(measure, last, rank)
        if cause is not None:
            return found._replace(cause=cause[0], detail=cause[1])
    if _changed(measure, first, rank, grown):
        by = _mean(grown or ())
        # A rank may have more work than before while others still have more than it.
        cause = _cause_of_change(measure, first, last, rank, by) if found.by > 0 or measure is _POWER else None
        if cause is not None:
            return found._replace(cause=cause[0], detail=cause[1], by=by, changed=True)
    return None


_FOREIGN = (SHARE, "another process uses its GPU")


def _cause_of_lead(measure: _Measure, last: Sequence[Round], rank: int) -> Optional[Tuple[str, str]]:
    """The cause that explains a lead, whatever was before; None if it may be the rank's usual work."""
    if measure is _SHARE:
        return _FOREIGN
    if measure is _CLOCK:
        return _slow_clock(last, rank) if all(card.slowed >= SLOWED for card in _cards(last, rank)) else None
    return _host_cause(measure, last, rank) if measure in _HOST and _is_late(last, rank) else None


def _cause_of_change(
    measure: _Measure, first: Sequence[Round], last: Sequence[Round], rank: int, by: float
) -> Optional[Tuple[str, str]]:
    """The cause of a lead that has grown."""
    if measure is _POWER:
        if not _others_fell(first, last, rank):
            return None
        return _FOREIGN if _memory_grew(first, last, rank) else (COMPUTE, "its GPU needs longer")
    if measure is _CLOCK:
        return _slow_clock(last, rank) if by >= CLOCK_ALONE else None
    if measure is _RUN:
        return COMPUTE, "its own work takes longer"
    return (COMPUTE, "its GPU waits for work") if measure is _IDLE else None


def _cards(last: Sequence[Round], rank: int) -> List[Gpu]:
    return [card for card in (one.ranks[rank].gpu for one in last) if card is not None]


def _slow_clock(last: Sequence[Round], rank: int) -> Tuple[str, str]:
    return CLOCK, "its GPU runs at %d MHz" % _mean([card.clock or 0.0 for card in _cards(last, rank)])


def _host_cause(measure: _Measure, last: Sequence[Round], rank: int) -> Tuple[str, str]:
    """The cause on a rank's node."""
    share = percent(_mean([measure.values(one)[rank] for one in last]))
    if measure is _DISK:
        return DISK, "it waits for a disk %s of the time" % share
    if measure is _DATA:
        return DATA, "it waits for its data loader %s of the time" % share
    if _mean([one.ranks[rank].quota for one in last]) >= QUOTA:
        return CPU, "its cgroup uses up its CPU quota"
    return CPU, "it waits for a processor %s of the time" % share


def _is_late(last: Sequence[Round], rank: int) -> bool:
    """Whether the others wait: its GPU is used less than theirs, or without GPUs they are busy for less of the time.

    A rank that waits for data may have less to do otherwise, or its GPU has work in the meantime.
    """
    if last[-1].ranks[rank].gpu is None:
        return _mean([ahead(_BUSY.values(one)).get(rank, 0.0) for one in last]) >= EACH
    known = [lead for lead in (ahead(_idle(one)).get(rank) for one in last) if lead is not None]
    return bool(known) and _mean(known) >= EACH


def _others_fell(first: Sequence[Round], last: Sequence[Round], rank: int) -> bool:
    """Whether the GPUs of the other ranks draw less power than they used to."""

    def others(one: Round) -> Optional[float]:
        values = [watts for number, watts in _power(one).items() if number != rank]
        return median(values) if values else None

    before = [watts for watts in map(others, first) if watts is not None]
    now = [watts for watts in map(others, last) if watts is not None]
    return bool(before and now) and median(now) <= (1 - POWER_MEAN) * median(before)


def _memory_grew(first: Sequence[Round], last: Sequence[Round], rank: int) -> bool:
    """Whether the memory of a rank's GPU grew, and that of the others did not."""

    def lead(one: Round) -> Optional[float]:
        used = {number: each.gpu.memory for number, each in one.ranks.items() if each.gpu and each.gpu.memory}
        return ahead(used).get(rank)

    before = [bytes_ for bytes_ in map(lead, first) if bytes_ is not None]
    now = [bytes_ for bytes_ in map(lead, last) if bytes_ is not None]
    return bool(before and now) and median(now) - median(before) >= SHARED


def _link_verdict(first: Sequence[Round], last: Sequence[Round]) -> Optional[Verdict]:
    """The slow link: from the node whose data waits to the one that it waits for."""
    leads, grown = _leads(_QUEUE, last), _grown(_QUEUE, first, last)
    for node in sorted(leads, key=lambda node: -_mean(leads[node])):
        changed = _changed(_QUEUE, first, node, grown.get(node))
        if not changed and not (_consistent(_QUEUE, leads[node]) and _mean(leads[node]) >= QUEUE_ALONE):
            continue
        to = max((pair for pair in last[-1].queues if pair[0] == node), key=last[-1].queues.__getitem__, default=None)
        if to is None:
            continue
        share = percent(_mean([_queues(one)[node] for one in last]))
        detail = "data from %s to %s waits %s of the time" % (node, to[1], share)
        # Acknowledgements wait too: a node with a slow link fills its own queues and those of others to it.
        at_end = to[1] in _queues(last[-1]) and _traffic(last, to[1]) > _traffic(last, node)
        one, other = (to[1], node) if at_end else (node, to[1])
        rank = min(number for number, each in last[-1].ranks.items() if each.node == one)
        return Verdict(rank, one, _QUEUE.name, LINK, _mean(leads[node]), detail, other, changed)
    return None


def _traffic(last: Sequence[Round], node: str) -> float:
    """The queues of a node and those of others to it, together."""
    return _mean([sum(share for pair, share in one.queues.items() if node in pair) for one in last])


def _over(named: Verdict, first: Sequence[Round], last: Sequence[Round]) -> bool:
    """Whether a named rank is as fast as the others again: no lead in any of the rounds."""
    measure = _MEASURES[named.measure]
    keys = (named.node, named.to) if measure is _QUEUE else (named.rank,)
    known = _grown(measure, first, last) if named.changed else _leads(measure, last)
    leads = [lead for key in keys for lead in known.get(key, ())]
    return bool(leads) and all(lead < measure.each for lead in leads)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percent(share: float) -> str:
    """``12 %``."""
    return "%.0f %%" % (100 * share)


NEXT = {
    CLOCK: "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    CPU: "top -H",
    LINK: "ip -s link; ethtool INTERFACE",
    DISK: "iostat -x 5",
    DATA: "clusterctl logs --rank {rank}",
    SHARE: "nvidia-smi",
    COMPUTE: "clusterctl check --limit {node}",
}


def sentence(verdict: Verdict) -> str:
    """The verdict as the user reads it, with the next command."""
    who = "the others wait for rank %d on %s" % (verdict.rank, verdict.node)
    how = {CLOCK: "throttled clock", CPU: "busy core", LINK: "slow link", SHARE: SHARE, COMPUTE: "slow rank"}
    cause = how.get(verdict.cause, verdict.cause)
    amount = "" if verdict.measure == "power" else " %s of the time" % percent(min(1.0, verdict.by))
    if verdict.cause == CLOCK:
        amount = ": its clock is %s lower" % percent(verdict.by)
    if verdict.cause == LINK:
        amount = ""
    command = NEXT[verdict.cause].format(rank=verdict.rank, node=verdict.node)
    place = "Run" if command.startswith("clusterctl") else "On %s" % verdict.node
    return "%s%s (%s: %s). %s: %s" % (who, amount, cause, verdict.detail, place, command)


def over(verdict: Verdict) -> str:
    """The message that a straggler is as fast as the others again."""
    return "rank %d on %s no longer delays the others" % (verdict.rank, verdict.node)
