"""What a run left behind, as data: lines with their times, events, samples, node by node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Event = Mapping[str, Any]

BEFORE = 1.0  # seconds that a line may be older than the event that begins its attempt: two writers, one clock


@dataclass(frozen=True)
class Line:
    """A line of a log.

    Attributes:
        text: without the time and the rank that the agent put before it.
        node: whose log it is; for a file given by hand the file's name.
        rank: None: the launcher's own.
        time: epoch seconds of the node's clock; None where nothing tells it.
        file: the file it is in, as a person opens it; "" where nothing tells it.
        number: its number in that file; 0: not known.
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
        node_rank: its place in the run.
        first_rank: the global rank of its local rank 0.
        lines: those of all its ranks and of the launcher, each rank's in their own order.
        events: what the agent wrote into ``events.jsonl`` (``trainer/agent/__main__.py``).
        samples: what it wrote into ``metrics.jsonl`` (``trainer/agent/metrics/samples.py``).
        state: its ``state.json``.
        links: what each interface can carry, in bytes a second, as far as the node tells.
        cores: how many processors it has; None where it does not tell.
        dated: its times can be compared with other nodes'; False: its lines name no year, or no time at all.
        agent: the lines of its ``agent.log``: what the agent itself printed.
        folder: where its files are, as a person finds them; "" where nothing tells.
        boot: when the machine was booted, in epoch seconds; None where it does not tell.
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


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run.

    Attributes:
        records: its nodes, in the order of their ranks.
        run: its id; "" for files given by hand.
        state: what the record of the run says: running, finished, failed, stopped; "" when it says nothing.
        missing: nodes of which nothing could be read, each with the reason.
    """

    records: tuple[Record, ...]
    run: str = ""
    state: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)


def comparable(evidence: Evidence) -> bool:
    """Whether the times of different records say what was first; one record's own times always do."""
    return len(evidence.records) < 2 or all(record.dated for record in evidence.records)


def attempts(evidence: Evidence) -> int:
    """How often the run was begun; 1 where nothing tells."""
    return max((number(event) for record in evidence.records for event in record.events), default=1)


def attempt(evidence: Evidence, wanted: int) -> Evidence:
    """The part of the evidence that belongs to one attempt. Files without times belong to every attempt."""
    return replace(evidence, records=tuple(_cut(record, wanted) for record in evidence.records))


def phased(evidence: Evidence) -> Evidence:
    """The evidence with the phase of the run in every sample: rank 0's node tells it, by events."""
    head = min(evidence.records, key=lambda record: record.node_rank, default=None)
    told = [event for event in head.events if event.get("event") == "phase" and "time" in event] if head else []
    if not told:
        return evidence

    def of(sample: Event) -> Event:
        before = [event for event in told if event["time"] <= sample.get("time", 0)]
        return sample if "phase" in sample or not before else {**sample, "phase": before[-1].get("phase")}

    return replace(
        evidence,
        records=tuple(replace(each, samples=tuple(map(of, each.samples))) for each in evidence.records),
    )


def number(event: Event) -> int:
    """The attempt that an event belongs to."""
    return int(event.get("attempt", 1))


def _cut(record: Record, wanted: int) -> Record:
    begins = _began(record, wanted)
    ends = _ended(record, wanted)

    def inside(time: float | None) -> bool:
        if time is None:
            return True
        return (begins is None or time >= begins - BEFORE) and (ends is None or time < ends)

    return replace(
        record,
        lines=tuple(line for line in record.lines if inside(line.time)),
        events=tuple(event for event in record.events if number(event) == wanted),
        samples=tuple(sample for sample in record.samples if inside(sample.get("time"))),
    )


def _began(record: Record, wanted: int) -> float | None:
    times = [event["time"] for event in record.events if number(event) == wanted and "time" in event]
    return min(times, default=None)


def _ended(record: Record, wanted: int) -> float | None:
    """When the next attempt begins, or the run is over: the kernel goes on to speak of others."""
    after = _began(record, wanted + 1)
    if after is not None:
        return after - BEFORE
    times = [event["time"] for event in record.events if event.get("event") == "end" and "time" in event]
    return max(times) + BEFORE if times else None
