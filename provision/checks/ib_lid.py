"""ib.lid: Active InfiniBand ports have an address of their own, and know the same subnet manager.

``lid`` and ``sm_lid`` in sysfs, which anybody may read. A LID is a port's address in its subnet; 0 is none.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from provision.checks.kit import Answers, Judgements
from provision.checks.kit.infiniband import ACTIVE, PORTS, Fault, Port, fabric, usual, worst

TITLE = "a LID of its own for every Active port, and one subnet manager for all"
WHY = "Ports without an address, or of two subnets, do not reach each other: the first all-reduce hangs."
PROBE = PORTS

_RESTART = "restart the subnet manager; with two of them, see ib.masters"


def judge(answers: Answers) -> Judgements:
    """Name ports without a LID, with another's LID, and with another subnet manager than their like."""
    cluster, others = fabric(answers)
    yield from others
    active = {name: [port for port in ports if port.state == ACTIVE] for name, ports in cluster.items()}
    manager = usual(active, _manager, by_model=False)
    taken = Counter((port.number_of("sm_lid"), port.number_of("lid")) for ports in active.values() for port in ports)
    for name, ports in active.items():
        fine = ", ".join(f"{port.name} LID {port.number_of('lid')}, SM {port.number_of('sm_lid')}" for port in ports)
        faults = [fault for port in ports for fault in _faults(port, taken, manager(port), _seen(active, port))]
        yield name, worst(faults, fine or "no port is Active")


def _manager(port: Port) -> int | None:
    return port.number_of("sm_lid") or None


def _seen(cluster: Mapping[str, Sequence[Port]], port: Port) -> str:
    every = {_manager(each) for ports in cluster.values() for each in ports if each.name == port.name}
    return " and ".join(str(lid) for lid in sorted(lid for lid in every if lid))


def _faults(
    port: Port, taken: Mapping[tuple[int | None, int | None], int], usual_manager: int | None, managers: str
) -> Iterator[Fault]:
    lid, manager = port.number_of("lid"), port.number_of("sm_lid")
    if lid is None or manager is None:
        yield Fault("UNKNOWN", f"{port.name}: its LID is not understood", "a LID", "")
    elif not lid:
        yield Fault("FAIL", f"{port.name} is Active and has no LID", "a LID", _RESTART)
    elif not manager:
        yield Fault("FAIL", f"{port.name} is Active and knows no subnet manager (sm_lid 0)", "sm_lid > 0", _RESTART)
    elif taken[manager, lid] > 1:
        observed = f"{port.name} has LID {lid}, and another port of the same subnet has it too"
        yield Fault("FAIL", observed, "a LID of its own", _RESTART)
    elif usual_manager is None:
        observed = f"{port.name}: the nodes know subnet managers at LIDs {managers}"
        yield Fault("FAIL", observed, "one subnet manager for all nodes", _RESTART)
    elif manager != usual_manager:
        observed = f"{port.name} knows the subnet manager at LID {manager}, its like know LID {usual_manager}"
        yield Fault("FAIL", observed, f"sm_lid {usual_manager}", f"{_RESTART}; is it cabled to another fabric?")
