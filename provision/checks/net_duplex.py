"""net.duplex: Whether the links that carry the training are full duplex.

/sys/class/net/*/duplex: ``full``, ``half``, or ``unknown`` where a driver does not say (kernel, sysfs-class-net).
"""

from provision.checks.kit import Answers, Judgements, ok, warn
from provision.checks.kit.network import carriers, facts

TITLE = "no half-duplex link carries the training"
WHY = "A half-duplex link is one whose autonegotiation failed: packets collide, and transfers crawl."

probe = facts


def judge(answers: Answers) -> Judgements:
    """WARN where the interface, or a device below it, is half duplex."""
    found, lost = carriers(answers)
    yield from lost
    for name, (net, link) in found.items():
        half = [each.name for each in (link, *net.devices(link)) if each.duplex == "half"]
        if half:
            fix = f"set switch port and node to autonegotiation: ethtool -s {half[0]} autoneg on"
            yield name, warn(f"{half[0]} is half duplex", fix=fix)
        else:
            yield name, ok(f"{link.name}: {link.duplex if link.duplex != 'unknown' else 'not told by the driver'}")
