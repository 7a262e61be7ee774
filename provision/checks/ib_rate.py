"""ib.rate: InfiniBand links run at the rate of their like on other nodes.

``rate`` in sysfs. The two ends of a link settle on less than they can do when the cable, the transceiver or the
switch port is worse than the adapter.
"""

from collections.abc import Iterator, Mapping

from provision.checks.kit import Answers, Judgements, Plan
from provision.checks.kit.infiniband import PORTS, Fault, Port, fabric, usual, worst

TITLE = "InfiniBand links run at full rate"
WHY = "An all-reduce is as slow as its slowest link: one cable at half the rate halves the speed of all nodes."
PROBE = PORTS
LIMITS = {"gbps": 0}  # what every link must reach at least; 0: what most of its like have


def judge(seen: Plan, answers: Answers) -> Judgements:
    """Name links that are slower than most of their like; where nodes are at odds, the faster ones are right."""
    cluster, others = fabric(answers)
    yield from others
    linked = {name: [port for port in ports if port.up] for name, ports in cluster.items()}
    expected = usual(linked, lambda port: port.gigabits)
    for name, ports in linked.items():
        shown = sorted({port.values.get("rate", "") for port in ports})
        fine = ", ".join(shown) or "no port has a link"
        wanted = {port.name: seen.limits["gbps"] or expected(port) or _best(linked, port) for port in ports}
        yield name, worst((fault for port in ports for fault in _faults(port, wanted[port.name])), fine)


def _best(cluster: Mapping[str, list[Port]], port: Port) -> float:
    return max((each.gigabits or 0) for ports in cluster.values() for each in ports if each.name == port.name)


def _faults(port: Port, wanted: float) -> Iterator[Fault]:
    if port.gigabits is None:
        yield Fault("UNKNOWN", f"{port.name}: rate {port.values.get('rate', '')!r} is not understood", "a rate", "")
    elif port.gigabits < wanted:
        observed = f"{port.name} runs at {port.gigabits:g} Gb/s in place of {wanted:g}"
        fix = f"replace the cable or transceiver of {port.name}; iblinkinfo names its switch port and what it could do"
        yield Fault("FAIL", observed, f"{wanted:g} Gb/s", fix)
