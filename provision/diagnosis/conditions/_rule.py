"""What every rule about a run that trains is, and how it reads a run's progress and samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Event, Evidence, Record


@dataclass(frozen=True)
class Limit:
    """A threshold and why it is what it is."""

    value: float
    why: str


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with how a run trains.

    Attributes:
        id: ``subject.word``; stable.
        title: what is wrong, for the page.
        look: gives a sentence for each place where it is so.
        fix: what to do, the first thing first.
        limits: the thresholds by name.
        leads: whether it may also be what a failure came of.
    """

    id: str
    title: str
    look: Callable[[Evidence, Mapping[str, Limit]], Iterable[str]]
    fix: tuple[str, ...]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    leads: bool = False


@dataclass(frozen=True)
class Condition:
    """A rule that was found to hold: what is wrong and what to do."""

    id: str
    says: tuple[str, ...]
    fix: tuple[str, ...]
    leads: bool = False


def steps(evidence: Evidence) -> list[Event]:
    """The run's progress by step: of the node that tells most; of a step that was made again the last telling."""
    best: dict[int, Event] = {}
    for record in evidence.records:
        found: dict[int, Event] = {}
        for event in record.events:
            if event.get("event") == "progress" and isinstance(event.get("step"), int):
                known = found.get(event["step"], {})
                found[event["step"]] = {**known, **{key: value for key, value in event.items() if value is not None}}
        best = max(best, found, key=len)
    return [best[step] for step in sorted(best)]


def series(events: Iterable[Event], name: str) -> list[float]:
    """The finite numbers of a field, in order."""
    return [float(value) for event in events if isinstance(value := event.get(name), int | float)]


def training(record: Record) -> list[Event]:
    """The node's samples while it trained: those of the phase training, or all but the first two where none is told."""
    told = [sample for sample in record.samples if sample.get("phase")]
    if told:
        return [sample for sample in told if sample["phase"] == "training"]
    return list(record.samples[2:])


def gpus(samples: Iterable[Event]) -> dict[int, list[Mapping[str, Any]]]:
    """What was said of each GPU, by its index."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        for gpu in sample.get("gpus") or ():
            if isinstance(gpu, dict) and isinstance(gpu.get("index"), int):
                found.setdefault(gpu["index"], []).append(gpu)
    return found


def numbers(rows: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The numbers of a field in rows that have one."""
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def rates(samples: Iterable[Event]) -> Iterator[tuple[str, list[float]]]:
    """Each interface and port with its larger direction, in bytes a second."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for kind in ("network", "infiniband"):
            for name, way in (sample.get(kind) or {}).items():
                if isinstance(way, dict):
                    both = [value for value in (way.get("in"), way.get("out")) if isinstance(value, int | float)]
                    found.setdefault(name, []).extend([max(both)] if both else [])
    yield from found.items()
