"""Measures the offsets of the nodes' clocks, with error bounds, over the open connections. Does not need chrony.

A node that reports its time between the moments ``sent`` and ``received`` is ahead by at least ``time - received`` and
at most ``time - sent`` (Cristian's algorithm, Distributed Computing 3, 1989). The intersection of several samples is
more precise than each (Marzullo's algorithm, as in NTP: RFC 5905, 11.2.1). This also helps a ``date`` without ``%N``
(busybox), which prints whole seconds: the samples are spread over a second, and one of them sees the second change.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan, limits
from provision.checks.kit.measures import Offset
from provision.checks.kit.measures import line as clock_line
from provision.model import Node, Remote
from provision.ssh.remote import DeadlineExceeded

if TYPE_CHECKING:
    from provision.errors import ClusterctlError
    from provision.session import Session

SAMPLES = 10
_FEWEST = 3
_ENOUGH = 1 / 20  # of the offset that clock.skew allows: a smaller error needs no more samples
_SPREAD = 0.11  # seconds between samples of whole seconds: ten of them cover one
_DEADLINE = 15.0
_SCRIPT = "LC_ALL=C\nexport LC_ALL\nwhile read -r _; do date +%s.%N; done\n"
_PAUSE = threading.Event()  # never set

Bounds = tuple[float, float]  # the lowest and the highest possible offset, in seconds


def measure(plan: Plan, session: Session) -> dict[str, Answer]:
    """The offset of every node from the controller's clock; an unreachable node's answer has the reason."""
    base = time.time() - time.monotonic()  # setting the controller's clock during the measurement changes nothing
    enough = limits("clock.skew", plan.inventory.checks)["skew_ms"] / 1e3 * _ENOUGH

    def one(node: Node) -> Answer:
        samples, whole = _sample(session.connections[node], base, enough)
        offset = combined(samples)
        if offset is None:
            return Answer(err="date printed no time")
        return Answer(clock_line(offset, len(samples), whole_seconds=whole))

    # A few at a time: threads that wait for one another would increase the errors.
    outcome = session.work("clock", "Comparing the clocks", one, on=plan.nodes, state=lambda _: "done", limit=16)
    return {**outcome.ok, **{name: broken(failure.error) for name, failure in outcome.failed.items()}}


def combined(samples: Sequence[Bounds]) -> Offset | None:
    """The offset that fits all samples; the most precise sample's, if a clock was set during the measurement."""
    if not samples:
        return None
    low, high = max(low for low, _ in samples), min(high for _, high in samples)
    if low > high:
        low, high = min(samples, key=lambda bounds: bounds[1] - bounds[0])
    return Offset((low + high) / 2, (high - low) / 2)


def bounds(answer: str, sent: float, received: float) -> tuple[Bounds, bool] | None:
    """The possible offsets after one answer of ``date``, and whether it has whole seconds; None if it is invalid."""
    match = re.fullmatch(r"([0-9]{1,12})(?:\.([0-9]{1,9}|%N|N))?", answer.strip())
    if not match:
        return None
    if whole := not (match[2] or "").isdigit():
        return (int(match[1]) - received, int(match[1]) + 1 - sent), whole
    return (float(f"{match[1]}.{match[2]}") - received, float(f"{match[1]}.{match[2]}") - sent), whole


def _sample(remote: Remote, base: float, enough: float) -> tuple[list[Bounds], bool]:
    """Run one script that answers each line with the time, so that a sample starts no program but ``date``.

    ``enough``: the error in seconds at which it stops.
    """
    found: list[Bounds] = []
    whole = False
    sent = 0.0
    answered = threading.Event()

    def requests() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(SAMPLES + 1):
            if whole:
                _PAUSE.wait(_SPREAD)
            elif len(found) >= _FEWEST and (offset := combined(found)) and offset.error <= enough:
                return
            sent = base + time.monotonic()
            yield b"\n"
            if not answered.wait(_DEADLINE):
                return
            answered.clear()

    def receive(text: str) -> None:
        nonlocal whole
        if one := bounds(text, sent, base + time.monotonic()):
            found.append(one[0])
            whole = one[1]
        answered.set()

    remote.run(_SCRIPT, stdin=requests(), on_line=receive, deadline=_DEADLINE)
    return found, whole


def broken(error: ClusterctlError | None) -> Answer:
    """The answer of a node that failed."""
    return Answer(state="hung") if isinstance(error, DeadlineExceeded) else Answer(rc=1, err=str(error))
