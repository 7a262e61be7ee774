"""net.mtu: Whether the interfaces that carry the training have the same MTU on all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._judging import odd
from provision.checks._net import carriers, facts
from provision.model import Finding

ID = "net.mtu"
LEVEL = 0
TITLE = "the same MTU on every node's data interface"
WHY = "Large packets vanish between nodes whose MTU differs: connections open, then hang with the first tensor."

probe = facts


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL on the nodes that differ."""
    found, lost = carriers(ID, answers)
    yield from lost
    values = {name: link.mtu for name, (_, link) in found.items()}
    interface = {link.name for _, link in found.values()}
    fix = f"ip link set {interface.pop() if len(interface) == 1 else 'INTERFACE'} mtu N, and on the switch"
    yield from odd(ID, values, what="MTU", fix=fix, verdict="FAIL")
