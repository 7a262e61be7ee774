"""net.duplex: Whether the links that carry the training are full duplex.

/sys/class/net/*/duplex: ``full``, ``half``, or ``unknown`` where a driver does not say (kernel, sysfs-class-net).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._net import carriers, facts
from provision.model import Finding

ID = "net.duplex"
LEVEL = 0
TITLE = "no half-duplex link carries the training"
WHY = "A half-duplex link is one whose autonegotiation failed: packets collide, and transfers crawl."

probe = facts


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where the interface, or a device below it, is half duplex."""
    found, lost = carriers(ID, answers)
    yield from lost
    for name, (net, link) in found.items():
        half = [each.name for each in (link, *net.devices(link)) if each.duplex == "half"]
        if half:
            fix = f"set switch port and node to autonegotiation: ethtool -s {half[0]} autoneg on"
            yield warn(ID, name, f"{half[0]} is half duplex", expected=TITLE, fix=fix)
        else:
            yield ok(ID, name, f"{link.name}: {link.duplex if link.duplex != 'unknown' else 'not told by the driver'}")
