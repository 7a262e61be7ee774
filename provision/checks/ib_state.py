"""ib.state: InfiniBand ports whose cable is up are Active.

``state`` in sysfs; ibstat shows INIT as Initializing. A port leaves INIT only when a subnet manager configures it
(InfiniBand Architecture Specification 1, 14.3).
"""

from collections.abc import Iterator

from provision.checks.kit import Answers, Judgements
from provision.checks.kit.infiniband import ACTIVE, PORTS, Fault, Port, fabric, listed, worst

TITLE = "InfiniBand ports with a link are Active"
WHY = "A port that is not Active carries no data: NCCL does not use it, or the training does not start."
PROBE = PORTS

_START = (
    "on the node that runs the subnet manager: systemctl restart opensmd with OFED, opensm on distributions; "
    "or give the inventory services: opensm: and deploy"
)


def judge(answers: Answers) -> Judgements:
    """Name the ports that wait for a subnet manager; ports without a link are those of ib.phys."""
    cluster, others = fabric(answers)
    yield from others
    for name, ports in cluster.items():
        linked = [port for port in ports if port.up]
        fine = f"{listed(port for port in linked if port.state == ACTIVE)} Active" if linked else "no port has a link"
        yield name, worst((fault for port in linked for fault in _faults(port)), fine)


def _faults(port: Port) -> Iterator[Fault]:
    if port.state == ACTIVE:
        return
    if port.state == 2:
        observed = f"{port.name} is Initializing: no subnet manager has configured it"
        yield Fault("FAIL", observed, "Active", _START)
    elif port.state in {3, 5}:
        word = "Armed" if port.state == 3 else "Active and deferred"
        yield Fault("WARN", f"{port.name} is {word}", "Active", "check again in a minute; then as for Initializing")
    else:
        observed = f"{port.name} is {port.values['state'] or 'in no known state'} though its cable has a signal"
        yield Fault(
            "FAIL", observed, "Active", f"ibportstate -C {port.device} -D 0 {port.number} reset, then look again"
        )
