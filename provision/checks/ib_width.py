"""ib.width: InfiniBand links use all lanes of their cables.

``rate`` in sysfs ends in the width, such as ``(4X NDR)``. 2X is right for the halves of a split cable (HDR100 and
NDR200 on splitter cables) when all of its like have it; 1X never is.
"""

from collections.abc import Iterator

from provision.checks.kit import Answers, Judgements
from provision.checks.kit.infiniband import PORTS, Fault, Port, fabric, usual, worst

TITLE = "InfiniBand links use all lanes"
WHY = "A link with one lane of four has a quarter of the bandwidth, and every all-reduce waits for it."
PROBE = PORTS


def judge(answers: Answers) -> Judgements:
    """Name links with a single lane, or with fewer than most of their like."""
    cluster, others = fabric(answers)
    yield from others
    linked = {name: [port for port in ports if port.up] for name, ports in cluster.items()}
    expected = usual(linked, lambda port: port.lanes)
    for name, ports in linked.items():
        fine = ", ".join(sorted({f"{port.lanes}X" for port in ports})) or "no port has a link"
        yield name, worst((fault for port in ports for fault in _faults(port, expected(port))), fine)


def _faults(port: Port, usual_lanes: int | None) -> Iterator[Fault]:
    wanted = max(usual_lanes or 0, 2)
    if port.lanes is None:
        yield Fault("UNKNOWN", f"{port.name}: rate {port.values.get('rate', '')!r} is not understood", "a width", "")
    elif port.lanes < wanted:
        lanes = "1 lane" if port.lanes == 1 else f"{port.lanes} lanes"
        expected = f"{usual_lanes}X" if usual_lanes == wanted else "4X"
        fix = f"clean or replace the cable of {port.name}: lanes of it are dead; a bent pin in the cage does the same"
        yield Fault("FAIL", f"{port.name} uses {lanes} ({port.values['rate']})", expected, fix)
