"""How far the nodes' clocks are apart, with error bars, over connections that are open already; chrony is not needed.

A node that says its time between the moments ``sent`` and ``heard`` is ahead by at least ``time - heard`` and at most
``time - sent`` (Cristian's algorithm, Distributed Computing 3, 1989). Where several samples allow less than each, so
much the better (Marzullo's intersection, as in NTP: RFC 5905, 11.2.1). So also a date without ``%N`` (busybox), which
knows whole seconds only, tells more than that: the samples are spread over a second, and one of them sees it end.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from provision.checks import Answer, Plan
from provision.checks.kit.measures import Offset, line
from provision.errors import ClusterctlError
from provision.model import Emit, Node, Remote, StageFinished, StageStarted
from provision.ssh.remote import DeadlineExceeded, fan_out

if TYPE_CHECKING:
    from provision.ssh.remote import Connections

SAMPLES = 10
_SPREAD = 0.11  # seconds between samples of whole seconds: ten of them cover one
_DEADLINE = 15.0
_SCRIPT = "LC_ALL=C\nexport LC_ALL\nwhile read -r _; do date +%s.%N; done\n"
_PAUSE = threading.Event()  # never set

Bounds = tuple[float, float]  # the offset lies between them, in seconds


def measure(plan: Plan, connections: Connections, emit: Emit) -> dict[str, Answer]:
    """The offset of every node against one steady clock of the controller; an unreachable node says why."""
    began = time.monotonic()
    emit(StageStarted("clock", "Comparing the clocks", len(plan.nodes)))
    base = time.time() - began  # the controller's own clock may be set meanwhile: its monotonic one is not

    def one(node: Node) -> Answer:
        samples, whole = _sample(connections[node], base)
        offset = combined(samples)
        if offset is None:
            return Answer(err="date gave no time")
        return Answer(line(offset, len(samples), whole_seconds=whole))

    # A few at a time: threads that wait for one another would lengthen the error bars.
    said = fan_out(plan.nodes, one, limit=16)
    states = {name: "unreachable" if isinstance(answer, ClusterctlError) else "done" for name, answer in said.items()}
    emit(StageFinished("clock", time.monotonic() - began, states))
    return {name: _answer(answer) for name, answer in said.items()}


def combined(samples: Sequence[Bounds]) -> Offset | None:
    """The offset on which all samples agree, or that of the most precise one when a clock was set meanwhile."""
    if not samples:
        return None
    low, high = max(low for low, _ in samples), min(high for _, high in samples)
    if low > high:
        low, high = min(samples, key=lambda bounds: bounds[1] - bounds[0])
    return Offset((low + high) / 2, (high - low) / 2)


def bounds(said: str, sent: float, heard: float) -> tuple[Bounds, bool] | None:
    """What one answer of ``date`` allows, and whether it knows whole seconds only; None for what is no time."""
    match = re.fullmatch(r"([0-9]{1,12})(?:\.([0-9]{1,9}|%N|N))?", said.strip())
    if not match:
        return None
    if whole := not (match[2] or "").isdigit():
        return (int(match[1]) - heard, int(match[1]) + 1 - sent), whole
    return (float(f"{match[1]}.{match[2]}") - heard, float(f"{match[1]}.{match[2]}") - sent), whole


def _sample(remote: Remote, base: float) -> tuple[list[Bounds], bool]:
    """One script that answers a line with the time: no program but date is started for a sample."""
    found: list[Bounds] = []
    whole = False
    sent = 0.0
    answered = threading.Event()

    def asks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(SAMPLES + 1):
            if whole:
                _PAUSE.wait(_SPREAD)
            sent = base + time.monotonic()
            yield b"\n"
            if not answered.wait(_DEADLINE):
                return
            answered.clear()

    def hear(text: str) -> None:
        nonlocal whole
        if one := bounds(text, sent, base + time.monotonic()):
            found.append(one[0])
            whole = one[1]
        answered.set()

    remote.run(_SCRIPT, stdin=asks(), on_line=hear, deadline=_DEADLINE)
    return found, whole


def _answer(answer: Answer | ClusterctlError) -> Answer:
    if isinstance(answer, DeadlineExceeded):
        return Answer(state="hung")
    return Answer(rc=1, err=str(answer)) if isinstance(answer, ClusterctlError) else answer
