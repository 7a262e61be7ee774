"""net.speed: Whether the links that carry the training run at the same speed on all nodes.

/sys/class/net/*/speed, megabits a second; -1 and EINVAL where a driver does not say, as those of most virtual machines.
"""

from provision.checks.kit import Answers, Judgements, majority, odd, ok
from provision.checks.kit.network import Link, Network, carriers, facts

TITLE = "the same link speed on every node's data interface"
WHY = "Every step waits for the slowest link: one node at 1 Gbit/s makes the others as slow."

probe = facts


def judge(answers: Answers) -> Judgements:
    """WARN on the nodes that differ; a driver that does not say is no fault unless the other nodes' say."""
    found, lost = carriers(answers)
    yield from lost
    values = {name: _speed(net, link) for name, (net, link) in found.items()}
    if majority(values) is None or any(values.values()):
        fix = "look at the cable, the transceiver and autonegotiation: ethtool INTERFACE"
        yield from odd(values, noun="link speed", show=_text, fix=fix)
        return
    for name in values:
        yield name, ok(f"the driver of {found[name][1].name} tells no speed")


def _speed(net: Network, link: Link) -> int:
    """Of the devices below where there are some (a bond's ports), in Mbit/s; 0: not known."""
    below = [device.speed or 0 for device in net.devices(link)]
    return link.speed or sum(below)


def _text(speed: int) -> str:
    if not speed:
        return "not told by the driver"
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"
