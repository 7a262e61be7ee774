"""ib.phys: the cables of InfiniBand ports carry a signal.

``phys_state`` in sysfs. A port that is down on every node while the node has others that are up is one that is not
cabled, as the second port of an adapter often is.
"""

from provision.checks.kit import Answers, Judgements
from provision.checks.kit.infiniband import PHYSICAL, PORTS, Fault, Port, fabric, listed, worst

TITLE = "InfiniBand cables carry a signal"
WHY = "A port without a link is missing from the training: NCCL uses fewer ports, or finds none and goes over TCP."
PROBE = PORTS

_FIXES = {
    1: "the port sleeps: ibportstate enable from a node of the fabric, then reseat the cable of {port}",
    2: "nothing answers at the other end: seat or replace the cable of {port}, and see that its switch port is enabled",
    3: "the port is switched off: mlxlink -d {device} -p {number} -a UP, or ibportstate enable; then its cable",
    4: "the two ends do not agree: replace the cable or transceiver of {port}; same speed at both ends",
    6: "the link keeps failing: replace the cable or transceiver of {port}",
    7: "the port is in a test mode: restart its driver on {device}",
}


def judge(answers: Answers) -> Judgements:
    """Name the ports without a signal, but for those that have none on any node."""
    cluster, others = fabric(answers)
    yield from others
    somewhere = {port.name for ports in cluster.values() for port in ports if port.up}
    for name, ports in cluster.items():
        up = [port for port in ports if port.up]
        bad = [port for port in ports if not port.up and (port.name in somewhere or not up)]
        unused = [port for port in ports if not port.up and port not in bad]
        fine = f"{listed(up)} LinkUp" + (f"; {listed(unused)} without a cable on every node" if unused else "")
        yield name, worst(map(_fault, bad), fine)


def _fault(port: Port) -> Fault:
    observed = f"{port.name} is {PHYSICAL.get(port.physical, port.values.get('phys_state', '') or 'in no known state')}"
    fix = _FIXES.get(port.physical, "reseat the cable of {port}")
    return Fault("FAIL", observed, "LinkUp", fix.format(port=port.name, device=port.device, number=port.number))
