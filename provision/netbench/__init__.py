"""Evaluates a network measurement: bandwidths, slow nodes, and the best settings. Pure.

``trainer/network`` measures and documents its events.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from provision.errors import UsageError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "sendrecv")
SIZES = "8M:512M"
FACTOR = 4  # from one size to the next
_LARGEST = 16 << 30
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
    if not 1024 <= size <= _LARGEST:
        raise UsageError(
            f"--sizes {text}: {word or 'nothing'} is not a size from 1K to 16G", hint="such as --sizes 8M:512M"
        )
    return size
