"""A run as the report shows it: what its nodes wrote, this machine's record, and the diagnosis."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from provision.errors import UsageError
from provision.masking import mask_env, mask_text, mask_words
from provision.run import config_text, fields
from provision.run.difference import Description, describe
from provision.run.environment import SETTINGS, flat, shown
from provision.run.sampled import traffic
from trainer.agent.contract import effective
from trainer.agent.contract.effective import Effective
from trainer.agent.contract.expected import Expected
from trainer.agent.contract.expected import read as read_expected
from trainer.agent.contract.throttle import HARDWARE, slowing
from trainer.reader import Row

Event = Mapping[str, Any]

SAMPLES = 2000  # samples of a node that are shown: a curve has about 1,000 pixels
SHOWN = 1000  # events that are listed
_TOGETHER = 16_000  # samples of all nodes together
_LEAST = 100  # samples of a node among very many
_GIB = 1 << 30
_HUGE = 1e300
_SLICE = 2.0  # seconds
_BANDS = (("ms", 1000.0), ("tokens_per_second", 1.0), ("gpu_memory", 1 / _GIB))  # a curve, and its factor
_SAME = 2.0  # seconds within which equal events of several nodes are one
_PROGRESS = re.compile(r'"time": ?([0-9]{1,12}(?:\.[0-9]{1,9})?).{0,200}?"step": ?([0-9]{1,15})\b')
_PLANNED = ("argv", "processes", "nnodes", "attempts", "grace", "cwd", "pattern")  # of a node's plan
_FILE = 64 << 10  # characters of a configuration file
PORT = "port "  # and its name: the curve of a network interface or InfiniBand port
_SLOWED = {*HARDWARE, "sw_thermal_slowdown"}  # a power cap alone is usual under load
_SKIPPED = {"progress", "log"}  # events that are curves or log lines


class Sample(NamedTuple):
    """A node's sample; ``values`` by the curve's name: percent, GiB, watts, degrees Celsius, MHz, MB per second."""

    time: float
    step: int | None
    values: Mapping[str, float]
    fields: Event = MappingProxyType({})  # as the agent wrote them


@dataclass(frozen=True)
class NodeData:
    """A node's part of a run.

    Attributes:
        name: the node's name.
        rank: its rank among the nodes.
        events: its events, without progress and log lines.
        times: when it reported each step: pairs of a step and epoch seconds, in order.
        samples: its samples, thinned.
        state: its ``state.json``.
    """

    name: str
    rank: int = 0
    events: tuple[Event, ...] = ()
    times: tuple[tuple[int, float], ...] = ()
    samples: tuple[Sample, ...] = ()
    state: Event = field(default_factory=dict)


@dataclass(frozen=True)
class RunData:
    """A run.

    Attributes:
        id: its id, or the name of its folder.
        state: its state; "" if unknown.
        nodes: the nodes with files, in the order of their ranks.
        rows: the numbers by step.
        counted: the rows are only numbered, because the log names no steps.
        record: this machine's record of it, without secrets; empty if there is none.
        missing: nodes without files, each with the reason.
        diagnosis: what ``diagnose`` prints.
        causes: of each attempt that failed before the last one, why.
        files: configuration files of the run, by name.
    """

    id: str
    state: str = ""
    nodes: tuple[NodeData, ...] = ()
    rows: tuple[Row, ...] = ()
    counted: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    diagnosis: str = ""
    causes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> NodeData | None:
        """The node with the lowest rank."""
        return self.nodes[0] if self.nodes else None

    @property
    def expected(self) -> Expected | None:
        """What the run was judged by; None if neither its agent nor the record has it."""
        state = self.head.state if self.head else {}
        return read_expected(state.get("expected")) or read_expected(self.record.get("expected"))

    @property
    def spent(self) -> Effective | None:
        """Where its time went, from the lowest rank whose agent saw steps; None for an older run.

        A node that was lost has an old account: the node that took its rank continues it.
        """
        lost = {name for each in self.nodes if isinstance(out := each.state.get("excluded"), dict) for name in out}
        nodes = [each for each in self.nodes if each.name not in lost]
        states = [found for each in nodes if (found := effective.read(each.state.get("spent")))]
        seen = (found for found in states if found.top is not None)
        return next(seen, states[0] if states else effective.read(self.record.get("spent")))

    @property
    def began(self) -> float | None:
        """The first time in the nodes' files, in epoch seconds."""
        first = [each.events[0].get("time") for each in self.nodes if each.events]
        first += [each.times[0][1] for each in self.nodes if each.times]
        first += [each.samples[0].time for each in self.nodes if each.samples]
        return min((time for time in first if time), default=None)

    @property
    def ended(self) -> float | None:
        """The last time in the nodes' files, in epoch seconds."""
        last = [each.events[-1].get("time") for each in self.nodes if each.events]
        last += [each.times[-1][1] for each in self.nodes if each.times]
        last += [each.samples[-1].time for each in self.nodes if each.samples]
        return max((time for time in last if time), default=None)


def samples_of(nodes: int) -> int:
    """How many samples of each node are shown, for a number of nodes."""
    return min(SAMPLES, max(_LEAST, _TOGETHER // max(1, nodes)))


def read_node(
    name: str, events: Iterable[str], samples: Sequence[str], state: str, *, rank: int = 0, nodes: int = 1
) -> NodeData:
    """A node's part of a run from the lines of its files. Skips incomplete and unknown lines.

    Args:
        name: the node's name.
        events: the lines of ``events.jsonl``.
        samples: the lines of ``metrics.jsonl``.
        state: the text of ``state.json``.
        rank: the node's rank if ``state`` does not have it.
        nodes: how many nodes share the limit of samples.
    """
    kept, times = [], []
    for line in events:
        if '"event": "progress"' in line:
            if found := _PROGRESS.search(line):
                times.append((int(found[2]), float(found[1])))
        elif '"event": "log"' not in line and (event := fields.read(line)) and event.get("event") not in _SKIPPED:
            kept.append(event)
    most = samples_of(nodes)
    read = (fields.read(line) for line in samples[:: max(1, math.ceil(len(samples) / most))])
    own = fields.read(state) or {}
    own_rank = own.get("node_rank")
    return NodeData(
        name,
        own_rank if isinstance(own_rank, int) else rank,
        tuple(kept),
        tuple(times),
        tuple(read_sample(sample) for sample in read if sample and "time" in sample),
        own,
    )


def read_sample(sample: Event) -> Sample:
    """A sample's values that have a curve."""
    found = dict(_gpu_values(sample.get("gpus") or ()))
    total, free = sample.get("memory_total"), sample.get("memory_available")
    if total and free is not None:
        found["memory"] = (total - free) / _GIB
    rates = {each.port: [rate for rate in (each.received, each.sent) if rate is not None] for each in traffic(sample)}
    ports = {port: sum(both) / 1e6 for port, both in rates.items() if both}
    if ports:
        found["network"] = sum(ports.values())
        found.update((PORT + port, value) for port, value in ports.items())
    step = sample.get("step")
    return Sample(sample["time"], step if isinstance(step, int) else None, found, sample)


def _gpu_values(gpus: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    names = ("use", "memory", "power", "temperature", "clock")
    use, memory, power, heat, clock = (
        [value for gpu in gpus if (value := gpu.get(name)) is not None and is_finite(value)] for name in names
    )
    if use:
        yield "gpu", sum(use) / len(use)
    if memory:
        yield "gpu_memory", max(memory) / _GIB
    if power:
        yield "power", sum(power)
    if heat:
        yield "temperature", max(heat)
    if clock:
        yield "sm_clock", min(clock)  # the slowest one sets the pace
    reasons = [gpu["throttle"] for gpu in gpus if isinstance(gpu.get("throttle"), list)]
    if reasons:
        yield "throttled", sum(bool(_SLOWED.intersection(slowing(each))) for each in reasons)


def is_finite(value: object) -> bool:
    """Whether a value is a number that a curve can have; whole numbers of any size are compared exactly."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def clock_jumps(times: Iterable[float]) -> int:
    """How often a node's clock went back."""
    count, before = 0, -math.inf
    for time in times:
        count += time < before
        before = time
    return count


def row_times(run: RunData) -> list[float | None]:
    """For each row, when its step was reported last; None if unknown."""
    known: dict[int, float] = {}
    for node in reversed(run.nodes):
        known.update(node.times)
    if run.counted:  # rows are numbered: they are the reports in their order
        ordered = [time for node in run.nodes[:1] for _, time in node.times]
        return [ordered[place] if place < len(ordered) else None for place in range(len(run.rows))]
    return [known.get(row.step) for row in run.rows]


def step_times(rows: Sequence[Row], times: Sequence[float | None]) -> list[float | None]:
    """Milliseconds per step from the times of the reports, for a log without them; None between two values.

    Agents see a step up to a quarter of a second late, so a value covers at least ``_SLICE`` seconds.
    """
    found: list[float | None] = []
    since: tuple[int, float] | None = None
    for row, time in zip(rows, times, strict=True):
        value = None
        if time is not None and (since is None or row.step <= since[0] or time < since[1]):
            since = (row.step, time)
        elif time is not None and since is not None and time - since[1] >= _SLICE:
            value = 1000 * (time - since[1]) / (row.step - since[0])
            since = (row.step, time)
        found.append(value)
    return found


def bands(run: RunData) -> dict[str, tuple[float, float]]:
    """The expected range of each curve that has one, by the curve's name."""
    band = run.expected
    ranges = () if band is None else zip(_BANDS, band[1:], strict=True)
    return {name: (low_high[0] * by, low_high[1] * by) for (name, by), low_high in ranges if low_high is not None}


@dataclass(frozen=True)
class Happening:
    """An event of one or several nodes: ``level`` is ``bad``, ``note`` or ""."""

    time: float
    nodes: tuple[str, ...]
    kind: str
    text: str
    attempt: int
    level: str = ""
    step: int | None = None


def happenings(run: RunData) -> list[Happening]:
    """The events of all nodes in the order of their times; equal ones of several nodes are one."""
    found: list[Happening] = []
    latest: dict[tuple[str, str, int], int] = {}
    every = sorted(
        ((float(event.get("time") or 0.0), node.name, event) for node in run.nodes for event in node.events),
        key=lambda each: each[0],
    )
    steps = sorted((time, step) for node in run.nodes[:1] for step, time in node.times)
    at, step = 0, None
    for time, name, event in every:
        while at < len(steps) and steps[at][0] <= time:
            step = steps[at][1]
            at += 1
        kind, text, level = _described(event)
        text = mask_text(text)
        attempt = event.get("attempt")
        key = (kind, text, attempt if isinstance(attempt, int) else 1)
        place = latest.get(key)
        if place is not None and time - found[place].time <= _SAME:
            before = found[place]
            if name not in before.nodes:
                found[place] = Happening(
                    before.time, (*before.nodes, name), kind, text, before.attempt, level, before.step
                )
            continue
        latest[key] = len(found)
        found.append(Happening(time, (name,), kind, text, key[2], level, step))
    return found


def _described(event: Event) -> tuple[str, str, str]:
    """An event's kind, text and level."""
    kind = str(event.get("event") or "?")
    get = event.get
    match kind:
        case "attempt":
            text = f"attempt {get('attempt', 1)} starts" + (f" from {get('checkpoint')}" if get("checkpoint") else "")
            return "restart" if (get("attempt") or 1) > 1 else kind, text, "note"
        case "phase":
            return kind, str(get("phase") or ""), ""
        case "notice":
            return kind, str(get("text") or ""), "" if get("level") == "info" else "note"
        case "straggler" | "stack":
            return kind, str(get("text") or ""), "note" if get("state") == "slow" else ""
        case "hang":
            return kind, str(get("text") or get("kind") or ""), "bad"
        case "peer":
            return kind, " ".join(str(get(key)) for key in ("node", "state", "text") if get(key)), "note"
        case "exit":
            code = get("signal") or f"exit code {get('rc')}"
            bad = not get("stopped") and get("rc") != 0
            return kind, str(get("error") or code), "bad" if bad else ""
        case "end":
            why = get("why")
            reason = f": {_reason(why)}" if isinstance(why, dict) else ""
            return kind, f"{get('state') or ''}{reason}", "bad" if get("state") == "failed" else "note"
        case _:
            known = ("text", "path", "checkpoint", "pid", "lines", "state")
            return kind, ", ".join(f"{key} {get(key)}" for key in known if get(key) is not None), ""


def _reason(why: Mapping[str, Any]) -> str:
    rank = why.get("rank")
    who = " ".join(part for part in (str(why.get("node") or ""), "" if rank is None else f"rank {rank}") if part)
    return ": ".join(part for part in (who, str(why.get("text") or "")) if part)


def configuration(run: RunData) -> dict[str, str]:
    """What the run was started with: this machine's record and the run's files, without secrets."""
    record = run.record
    found = {key: shown(record[key]) for key in ("launcher", "argv", "who", "master") if record.get(key)}
    if record.get("prefix"):
        found["release"] = shown(record["prefix"]).rstrip("/").rpartition("/")[2]
    plans = record.get("plans")
    plan = next(iter(plans.values()), None) if isinstance(plans, dict) else None
    if isinstance(plan, dict):
        found.update({f"plan.{key}": shown(plan[key]) for key in _PLANNED if plan.get(key) not in (None, "", [])})
        env = plan.get("env")
        if isinstance(env, dict):
            found.update({f"env.{name}": shown(value) for name, value in sorted(mask_env(env).items())})
    for name, text in sorted(run.files.items()):
        found.update({f"{name}: {key}": value for key, value in file_settings(name, text)})
    return dict(islice(found.items(), SETTINGS))


def described(run: RunData) -> Description:
    """The run for a comparison."""
    files = {f"{name}: {key}": value for name, text in run.files.items() for key, value in file_settings(name, text)}
    return describe(run.id, run.record, nodes=[node.name for node in run.nodes], files=files)


@cache
def file_settings(name: str, text: str) -> tuple[tuple[str, str], ...]:
    """The values of a configuration in YAML or JSON by their paths; none if it is no mapping of bounded size."""
    try:
        content = config_text.load(name, text)[1] if len(text) <= _FILE else None
    except UsageError:
        return ()
    if not isinstance(content, dict):
        return ()
    found = []
    for key, value in islice(flat("", content), SETTINGS):
        word = mask_words([f"{key.rpartition('.')[2]}={value}"])[0]
        found.append((key, shown(word.partition("=")[2])))
    return tuple(found)
