"""Evaluates a network measurement: bandwidths, failed ranks, slow nodes and links, and the best settings. Pure.

``trainer/network`` measures and documents its events.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from provision.errors import UsageError
from trainer.agent.contract.untrusted import UntrustedError, is_number, is_whole, parse_object

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "sendrecv")
SIZES = "8M:512M"
FACTOR = 4  # from one size to the next
_LARGEST_SIZE = 16 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bus_factor(op: str, world: int) -> float:
    """The ratio of bus bandwidth to algorithm bandwidth.

    Defined as in NCCL's tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the least that
    each rank must send and receive, so that the figure is comparable with the hardware's for any number of ranks.
    """
    if op == "all_reduce":
        return 2 * (world - 1) / world
    if op in {"all_gather", "reduce_scatter"}:
        return (world - 1) / world
    return 1.0


@dataclass(frozen=True)
class Row:
    """One operation in one size. Bandwidths are bytes a second.

    Attributes:
        op: one of ``OPS``.
        size: S of NCCL's tests, in bytes.
        world: the number of processes.
        times: the seconds of every iteration.
        wrong: the number of wrong elements in the result.
    """

    op: str
    size: int
    world: int
    times: tuple[float, ...]
    wrong: int = 0

    @property
    def seconds(self) -> float:
        """The median of the iterations."""
        return statistics.median(self.times)

    @property
    def algbw(self) -> float:
        """Bytes a second, from the program's point of view."""
        return self.size / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes a second, from the hardware's point of view."""
        return self.algbw * bus_factor(self.op, self.world)

    @property
    def spread(self) -> float:
        """The interquartile range of the iterations, relative to the median."""
        if len(self.times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return (high - low) / self.seconds


def rows(events: Iterable[Mapping[str, Any]]) -> tuple[Row, ...]:
    """The rows among the events of a measurement."""
    return tuple(
        Row(event["op"], event["bytes"], event["world"], tuple(event["times"]), event["wrong"])
        for event in events
        if event["event"] == "row"
    )


def parse_ops(text: str) -> tuple[str, ...]:
    """``all_reduce,sendrecv`` -> the operations, each once.

    Raises:
        UsageError: one of them is unknown.
    """
    names = tuple(dict.fromkeys(word.strip().replace("-", "_") for word in text.split(",") if word.strip()))
    unknown = [name for name in names if name not in OPS]
    if unknown or not names:
        raise UsageError(
            f"--ops {text}: {', '.join(unknown) or 'nothing'} is not an operation", hint=f"use some of {','.join(OPS)}"
        )
    return names


def parse_sizes(text: str) -> tuple[int, ...]:
    """``8M:512M`` -> from 8 MiB to 512 MiB, each ``FACTOR`` times the one before; ``64M`` is one, ``1M,64M`` are two.

    Raises:
        UsageError: it is neither.
    """
    sizes: list[int] = []
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        first, last = _size(low, text), _size(high, text) if colon else _size(low, text)
        if first > last:
            raise UsageError(f"--sizes {text}: {high} is less than {low}", hint=f"swap them: {high}:{low}")
        while first < last:
            sizes.append(first)
            first *= FACTOR
        sizes.append(last)
    return tuple(sorted(set(sizes)))


def _size(word: str, text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)(?:i?B)?", word.strip(), re.IGNORECASE)
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 1024 <= size <= _LARGEST_SIZE:
        raise UsageError(
            f"--sizes {text}: {word or 'nothing'} is not a size from 1K to 16G", hint="such as --sizes 8M:512M"
        )
    return size


# --- events ---------------------------------------------------------------------------------------

_LINE = 4 << 20  # characters: a row holds the time of every iteration
_LARGEST_NUMBER = 1 << 53


def _count(value: Any) -> bool:
    return is_whole(value, _LARGEST_NUMBER)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _times(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_number(each) and each > 0 for each in value)


def _number(value: Any) -> bool:
    return is_number(value, least=0.0)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "met": {"rank": _count},
    "ready": {"rank": _count, "busy": _number},
    "row": {"op": _text, "bytes": _count, "world": _count, "times": _times, "wrong": _count},
    "pair": {"a": _count, "b": _count, "bytes": _count, "times": _times},
    "skipped": {"op": _text, "why": _text},
    "network": {"rank": _count, "text": _text},
    "failed": {"rank": _count, "why": _text, "log": _texts},
    "end": {},
}


def parse_event(line: str, nodes: int) -> dict[str, Any] | None:
    """The event in a line; None if it is not an event, such as another program's output.

    Args:
        line: a line of a node's output.
        nodes: the number of nodes.
    """
    try:
        event = parse_object(line, limit=_LINE)
    except UntrustedError:
        return None
    checks = _FIELDS.get(kind) if isinstance(kind := event.get("event"), str) else None
    if checks is None or not all(name in event and check(event[name]) for name, check in checks.items()):
        return None
    if kind == "pair" and max(event["a"], event["b"]) >= nodes:
        return None
    return event


_STACK = re.compile(r"\n?(Exception raised from|frame #\d+|Traceback \(most recent)")
_NOISE = re.compile(r"NCCL INFO|Exception raised from|^\s*frame #\d+|^\s*$|Traceback \(most recent")
_TELLING = re.compile(r"(?i)error|warn|fail|refused|timed out|no such|not found")
_WAITED = re.compile(r"(?i)time[d-]?\s?out|connection (reset|refused|closed)|failed to connect|no output for")
_TEXT = 400  # characters of torch's message


def failure_reason(event: Mapping[str, Any]) -> str:
    """Why a rank failed, from the event ``failed``: its message, and the relevant lines of its log."""
    why = _STACK.split(str(event["why"]), maxsplit=1)[0].strip()
    why = " ".join(why.split())[:_TEXT]
    relevant = [line.strip() for line in event["log"] if not _NOISE.search(line) and _TELLING.search(line)]
    more = [line for line in dict.fromkeys(relevant) if why[:60] not in " ".join(line.split())][-4:]
    return "\n".join([f"rank {event['rank']}: {why}", *more])


def failed_stage(events: Sequence[Mapping[str, Any]], world: int) -> str:
    """How far the ranks came before they timed out; "" for another failure."""
    if not any(event["event"] == "failed" and _WAITED.search(str(event["why"])) for event in events):
        return ""
    seen = {kind: {event["rank"] for event in events if event["event"] == kind} for kind in ("met", "ready")}
    if len(seen["ready"]) == world:
        return ""
    if len(seen["met"]) == world:
        return "all ranks reached rank 0, but not one another: is there a firewall between the nodes?"
    missing = sorted(set(range(world)) - seen["met"])
    return f"rank {', '.join(map(str, missing))} did not reach rank 0's port"


# --- pairs of nodes -------------------------------------------------------------------------------

SLOW = 0.75  # of a typical node's rate with its best partner: a pair below it is slow
PAIR_SIZE = 64 << 20  # bytes at most in each direction: enough that the start of a transfer does not matter

Pair = tuple[str, str]


@dataclass(frozen=True)
class Judgement:
    """The slow nodes and links.

    Attributes:
        usual: bytes a second of a typical node with its best partner.
        nodes: slow nodes, each with the numbers of its slow pairs and of its pairs.
        links: slow pairs that no slow node explains.
        compared: whether there are several pairs to compare.
    """

    usual: float
    nodes: Mapping[str, tuple[int, int]]
    links: tuple[Pair, ...]
    compared: bool = True


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every node meets every other node once, with as many pairs at a time as possible (circle method).

    With an odd count, one node rests in every round.
    """
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        round_ = [
            (min(a, b), max(a, b))
            for a, b in zip(seats[:half], reversed(seats[half:]), strict=True)
            if a is not None and b is not None
        ]
        found.append(sorted(round_))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def pair_rates(events: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[Pair, float]:
    """Bytes a second in each direction of every pair of nodes, summed over its processes.

    Only the better half of a pair's iterations counts, because other programs may use the network at the same time.
    """
    found: dict[Pair, float] = defaultdict(float)
    for event in events:
        if event["event"] == "pair":
            better = statistics.median_low(sorted(event["times"])[: (len(event["times"]) + 1) // 2])
            found[names[event["a"]], names[event["b"]]] += event["bytes"] / better
    return dict(found)


def slow_pairs(measured: Mapping[Pair, float], slow: float = SLOW) -> list[Pair]:
    """The slow pairs, the slowest first; empty if there is only one pair."""
    if len(measured) < 2:
        return []
    limit = slow * usual_rate(measured)
    return sorted((pair for pair, rate in measured.items() if rate < limit), key=lambda pair: measured[pair])


def usual_rate(measured: Mapping[Pair, float]) -> float:
    """A typical node's rate with its best partner: the median over the nodes.

    The median over the pairs would fail with three nodes, where one slow node is in two of the three pairs.
    """
    best: dict[str, float] = {}
    for pair, rate in measured.items():
        for name in pair:
            best[name] = max(rate, best.get(name, 0.0))
    return statistics.median_high(best.values()) if best else 0.0


def judge_pairs(measured: Mapping[Pair, float], slow: float = SLOW) -> Judgement:
    """Find the slow nodes, then the slow links that they do not explain.

    A node is slow if all its pairs are slow, or if half of its pairs are slow while its partners are slow with no other
    node.
    """
    level = usual_rate(measured)
    if len(measured) < 2:
        return Judgement(level, {}, (), compared=False)
    bad = slow_pairs(measured, slow)
    pairs_of: dict[str, dict[str, float]] = defaultdict(dict)
    for (a, b), rate in measured.items():
        pairs_of[a][b] = pairs_of[b][a] = rate
    nodes = [name for name, rates in pairs_of.items() if max(rates.values()) < slow * level]
    left = _without(bad, nodes)
    while (name := _hub(left, pairs_of)) is not None:
        nodes.append(name)
        left = _without(left, [name])
    counts = {name: (sum(name in pair for pair in bad), len(pairs_of[name])) for name in nodes}
    return Judgement(level, counts, tuple(left))


def _without(pairs: Iterable[Pair], nodes: Collection[str]) -> list[Pair]:
    return [pair for pair in pairs if not set(pair) & set(nodes)]


def _hub(bad: Sequence[Pair], pairs_of: Mapping[str, Mapping[str, float]]) -> str | None:
    """A node in several slow pairs whose partners are in no other slow pair."""
    partners: dict[str, set[str]] = defaultdict(set)
    for a, b in bad:
        partners[a].add(b)
        partners[b].add(a)
    for name, met in partners.items():
        if len(met) >= 2 and 2 * len(met) >= len(pairs_of[name]) and all(len(partners[each]) == 1 for each in met):
            return name
    return None


# --- NCCL's socket settings -----------------------------------------------------------------------

# NCCL's documentation (Environment Variables: NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD) allows 16 threads, and 64
# sockets in all for a connection. NCCL_MIN_NCHANNELS is the least number of rings; each has its own connections.
THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS = "NCCL_NSOCKS_PERTHREAD"
CHANNELS = "NCCL_MIN_NCHANNELS"
VARIABLES = (THREADS, SOCKETS, CHANNELS)
WORTH = 1.05  # times the present setting: a smaller gain is not worth a change
BETTER = 1.03  # times the best so far: a smaller gain may be chance
MOST_SETTINGS = 24  # settings to try
_PATIENCE = 2  # settings in a row without a gain until a direction is abandoned
_MOST_THREADS, _MOST_SOCKETS, _MOST_CHANNELS = 16, 64, 32


@dataclass(frozen=True)
class Setting:
    """A value for each of ``VARIABLES``; None leaves it to NCCL."""

    threads: int | None = None
    sockets: int | None = None
    channels: int | None = None

    @property
    def env(self) -> dict[str, str]:
        """The variables that are set."""
        values = zip(VARIABLES, (self.threads, self.sockets, self.channels), strict=True)
        return {name: str(value) for name, value in values if value is not None}

    @property
    def allowed(self) -> bool:
        """Whether NCCL accepts the setting."""
        threads, sockets, channels = self.threads or 1, self.sockets or 1, self.channels or 1
        return threads <= _MOST_THREADS and threads * sockets <= _MOST_SOCKETS and channels <= _MOST_CHANNELS

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Setting:
        """The setting in an environment; like NCCL, it ignores values that are not positive whole numbers."""
        return cls(
            *(int(value) if (value := env.get(name, "")).isdecimal() and int(value) else None for name in VARIABLES)
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.env.items()) or "NCCL's defaults"


Measure = Callable[[Setting], float | None]  # bytes a second; None if the setting does not work


@dataclass(frozen=True)
class Tuning:
    """The result of the search. Bandwidths are bytes a second.

    Attributes:
        default: the bandwidth with NCCL's defaults.
        present: the inventory's setting, with ``present_busbw``.
        best: the fastest setting, with ``best_busbw``; all three were measured again after the search.
        tried: every setting with its first bandwidth; None if it failed.
    """

    default: float
    present: Setting
    present_busbw: float
    best: Setting
    best_busbw: float
    tried: tuple[tuple[Setting, float | None], ...]

    @property
    def factor(self) -> float:
        """The ratio of the best setting to the defaults."""
        return self.best_busbw / self.default

    @property
    def gain(self) -> float:
        """The ratio of the best setting to the present one; infinite if that did not work."""
        return self.best_busbw / self.present_busbw if self.present_busbw else math.inf

    @property
    def worth_it(self) -> bool:
        """Whether the best setting should replace the present one."""
        return self.best != self.present and self.gain >= WORTH


def search_settings(measure: Measure, present: Setting) -> Tuning:
    """Find the fastest setting, starting from the faster of NCCL's defaults and the present setting.

    First each value is doubled until that gains nothing, one after the other; then all are halved and doubled around
    the best until none of these is better. At the end the best, the defaults and the present setting are measured
    again, so that a lucky first measurement decides nothing.

    Args:
        measure: measures a setting.
        present: the inventory's setting.

    Raises:
        ValueError: even NCCL's defaults do not work.
    """
    tried: dict[Setting, float | None] = {}

    def rate(setting: Setting) -> float:
        if setting not in tried:
            tried[setting] = measure(setting)
        return tried[setting] or 0.0

    default = Setting()
    if not rate(default):
        raise ValueError("NCCL's defaults could not be measured")
    best = max((default, present), key=rate)
    for axis in ("threads", "sockets", "channels"):
        best = _double(rate, best, axis)
    better: Setting | None = best
    while better is not None and len(tried) < MOST_SETTINGS:
        best = better
        better = next(
            (each for each in _around(best) if len(tried) < MOST_SETTINGS and rate(each) > rate(best) * BETTER), None
        )
    best = better or best

    def again(setting: Setting) -> float:
        return statistics.mean((rate(setting), measure(setting) or 0.0))

    final = {each: again(each) for each in dict.fromkeys((default, present, best))}
    return Tuning(final[default], present, final[present], best, final[best], tuple(tried.items()))


def _double(rate: Callable[[Setting], float], start: Setting, axis: str) -> Setting:
    """Double one value as long as that helps."""
    best, failed = start, 0
    setting = start
    while failed < _PATIENCE:
        setting = _scale(setting, axis, 2)
        if not setting.allowed:
            break
        if rate(setting) > rate(best) * BETTER:
            best, failed = setting, 0
        else:
            failed += 1
    return best


def _around(setting: Setting) -> Iterator[Setting]:
    """The settings next to one, each with one value doubled or halved, or threads traded for sockets."""
    for axis, other in (("threads", "sockets"), ("sockets", "threads")):
        yield from _allowed(_scale(_scale(setting, axis, 2), other, 0.5))
    for axis in ("channels", "threads", "sockets"):
        for factor in (2, 0.5):
            yield from _allowed(_scale(setting, axis, factor))


def _allowed(setting: Setting) -> Iterator[Setting]:
    if setting.allowed:
        yield setting


def _scale(setting: Setting, axis: str, factor: float) -> Setting:
    """One value doubled or halved. NCCL's default counts as one, except for channels, of which it has at least two."""
    least = 2 if axis == "channels" else 1
    value = int((getattr(setting, axis) or least) * factor)
    return replace(setting, **{axis: value if value > least else None})
