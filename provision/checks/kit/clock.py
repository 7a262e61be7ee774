"""What the clock measure brings back: offsets between nodes with their error bars. Pure.

Nobody's clock is believed to be right: the measure asks every node for its time over an open connection, and compares
the answer with the middle of the moments before and after. What is common to all nodes is the controller's own error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from provision.checks import Answer


@dataclass(frozen=True)
class Offset:
    """How far a node's clock is ahead of the controller's, in seconds, and by how much that may be wrong."""

    seconds: float
    error: float

    def minus(self, other: Offset) -> Offset:
        """How far this clock is ahead of another one."""
        return Offset(self.seconds - other.seconds, self.error + other.error)


def line(offset: Offset, samples: int, *, whole_seconds: bool) -> str:
    """What stands in the answer's ``out``; ``offset`` reads it."""
    resolution = " whole-seconds" if whole_seconds else ""
    return f"offset {offset.seconds:.6f} {offset.error:.6f} {samples}{resolution}\n"


def offset(answer: Answer) -> Offset | None:
    """The offset in an answer; None when there is none."""
    match = re.match(r"offset (-?\d{1,12}\.\d{6}) (\d{1,12}\.\d{6}) \d+", answer.out)
    return Offset(float(match[1]), float(match[2])) if match else None


def skews(offsets: Mapping[str, Offset]) -> dict[tuple[str, str], Offset]:
    """The matrix: by (node, other), how far the node's clock is ahead of the other's."""
    return {
        (one, other): mine.minus(theirs)
        for one, mine in offsets.items()
        for other, theirs in offsets.items()
        if one != other
    }


def shown(offset: Offset, *, sign: bool = True) -> str:
    """``+12 ms ± 0.4 ms``, ``-5.0 s ± 1 ms``."""
    seconds = offset.seconds if abs(offset.seconds) >= 5e-5 else 0.0  # no -0.0
    return f"{'+' if sign and seconds >= 0 else ''}{span(seconds)} ± {span(offset.error)}"


def span(seconds: float) -> str:
    """Seconds with a unit that suits them: ``0.4 ms``, ``80 ms``, ``5.0 s``, ``3 h``."""
    size = abs(seconds)
    if size < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if size < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if size < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if size < 7200 else f"{seconds / 3600:.0f} h"
