"""A run's logs, events and samples as data, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

Event = Mapping[str, Any]

BEFORE = 1.0  # seconds that a line may be older than the event that starts its attempt: two writers, one clock


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        text: without the agent's time and rank.
        node: the node; for a log file, its name.
        rank: None: the launcher.
        time: epoch seconds of the node's clock; None if unknown.
        file: the path of its file; "" if unknown.
        number: its line number in that file; 0 if unknown.
    """

    text: str
    node: str
    rank: int | None = None
    time: float | None = None
    file: str = ""
    number: int = 0


@dataclass(frozen=True)
class Record:
    """One node's part of a run.

    Attributes:
        node: its name.
        node_rank: its rank among the nodes.
        first_rank: the global rank of its local rank 0.
        lines: the lines of all its ranks and of the launcher, in order for each rank.
        events: the events in ``events.jsonl`` (``trainer/agent/__main__.py``).
        samples: the samples in ``metrics.jsonl`` (``trainer/agent/sampling.py``).
        state: its ``state.json``.
        links: the capacity of its interfaces, in bytes per second, if known.
        cores: its number of processors; None if unknown.
        dated: its times can be compared with other nodes; False: its lines have no year, or no time.
        agent: the lines of its ``agent.log``, which the agent itself printed.
        folder: the folder of its files; "" if unknown.
        boot: when the machine booted, in epoch seconds; None if unknown.
        pattern: the user's regular expression for the lines of the training; None: the known formats.
    """

    node: str
    node_rank: int = 0
    first_rank: int = 0
    lines: tuple[Line, ...] = ()
    events: tuple[Event, ...] = ()
    samples: tuple[Event, ...] = ()
    state: Event = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)
    cores: int | None = None
    dated: bool = True
    agent: tuple[Line, ...] = ()
    boot: float | None = None
    folder: str = ""
    pattern: str | None = None

    @cached_property
    def training(self) -> list[Event]:
        """The samples of the phase training, or all but the first two if no sample has a phase."""
        phased = [sample for sample in self.samples if sample.get("phase")]
        if phased:
            return [sample for sample in phased if sample["phase"] == "training"]
        return list(self.samples[2:])

    @cached_property
    def gpus(self) -> dict[int, list[Mapping[str, Any]]]:
        """The samples of each GPU in training, by its index."""
        found: dict[int, list[Mapping[str, Any]]] = {}
        for sample in self.training:
            for gpu in sample.get("gpus") or ():
                if isinstance(gpu, dict) and isinstance(gpu.get("index"), int):
                    found.setdefault(gpu["index"], []).append(gpu)
        return found


@dataclass(frozen=True)
class Evidence:
    """All data about a run.

    Attributes:
        records: its nodes, in the order of their ranks.
        run: its id; "" for log files.
        state: the state in the run's record: running, finished, failed, stopped; "" if unknown.
        missing: nodes without logs, each with the reason.
        unsent: git-ignored paths of the code that were not sent.
        release: the release's 12 hex digits; "" if unknown.
    """

    records: tuple[Record, ...]
    run: str = ""
    state: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)
    unsent: tuple[str, ...] = ()
    release: str = ""


def comparable(evidence: Evidence) -> bool:
    """Whether the times of different records can be compared; the times of a single record always can."""
    return len(evidence.records) < 2 or all(record.dated for record in evidence.records)


def attempts(evidence: Evidence) -> int:
    """How often the run was started; 1 if unknown."""
    return max((number(event) for record in evidence.records for event in record.events), default=1)


def attempt(evidence: Evidence, wanted: int) -> Evidence:
    """The part of the evidence that belongs to one attempt. Files without times belong to every attempt."""
    return replace(evidence, records=tuple(_cut(record, wanted) for record in evidence.records))


def phased(evidence: Evidence) -> Evidence:
    """The evidence with the run's phase in every sample, from the events of rank 0's node."""
    head = min(evidence.records, key=lambda record: record.node_rank, default=None)
    phases = [event for event in head.events if event.get("event") == "phase" and "time" in event] if head else []
    if not phases:
        return evidence

    def add_phase(sample: Event) -> Event:
        before = [event for event in phases if event["time"] <= sample.get("time", 0)]
        return sample if "phase" in sample or not before else {**sample, "phase": before[-1].get("phase")}

    return replace(
        evidence,
        records=tuple(replace(each, samples=tuple(map(add_phase, each.samples))) for each in evidence.records),
    )


def number(event: Event) -> int:
    """The attempt that an event belongs to."""
    return int(event.get("attempt", 1))


def _cut(record: Record, wanted: int) -> Record:
    start = _start(record, wanted)
    end = _end(record, wanted)

    def inside(time: float | None) -> bool:
        if time is None:
            return True
        return (start is None or time >= start - BEFORE) and (end is None or time < end)

    return replace(
        record,
        lines=tuple(line for line in record.lines if inside(line.time)),
        events=tuple(event for event in record.events if number(event) == wanted),
        samples=tuple(sample for sample in record.samples if inside(sample.get("time"))),
    )


def _start(record: Record, wanted: int) -> float | None:
    times = [event["time"] for event in record.events if number(event) == wanted and "time" in event]
    return min(times, default=None)


def _end(record: Record, wanted: int) -> float | None:
    """When the next attempt starts or the run ends: later lines of the kernel's log concern other programs."""
    after = _start(record, wanted + 1)
    if after is not None:
        return after - BEFORE
    times = [event["time"] for event in record.events if event.get("event") == "end" and "time" in event]
    return max(times) + BEFORE if times else None
