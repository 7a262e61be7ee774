"""net.ports: Whether there are enough ports for connections, and MASTER_PORT is not among those given away.

Outgoing connections get a port of net.ipv4.ip_local_port_range (32768 to 60999 by default), without those of
ip_local_reserved_ports (kernel, ip-sysctl).
"""

import re
from collections.abc import Iterator

from provision.checks.kit import Answer, Judgement, Plan, ok, unknown, warn

TITLE = "enough ports for connections, and MASTER_PORT not among them"
WHY = "NCCL and Gloo open a connection for each pair of ranks and channel; one of them may get MASTER_PORT first."
PROBE = """\
cat /proc/sys/net/ipv4/ip_local_port_range
echo "reserved $(cat /proc/sys/net/ipv4/ip_local_reserved_ports 2>/dev/null)"
"""
LIMITS = {"ports": 10000}  # a rank has some hundreds of connections, and closed ones keep their port for a minute


def judge(plan: Plan, node: str, answer: Answer) -> Judgement:
    """WARN for fewer than ``ports``, or where MASTER_PORT may be given to another program."""
    port = plan.inventory.train.port or DEFAULT
    match = _PORTS.fullmatch(answer.out.strip())
    if not match:
        return unknown("net.ipv4.ip_local_port_range cannot be read")
    low, high = int(match[1]), int(match[2])
    reserved = any(first <= port <= last for first, last in _ranges(match[3]))
    if high - low + 1 < plan.limits["ports"]:
        observed = f"{high - low + 1} ports ({low}-{high})"
        fix = "sysctl -w net.ipv4.ip_local_port_range='32768 60999', and in /etc/sysctl.d"
        return warn(observed, expected=f"at least {plan.limits['ports']:g}", fix=fix)
    if low <= port <= high and not reserved and node == plan.nodes[0].name:
        observed = f"MASTER_PORT {port} is one of {low}-{high}, which any outgoing connection may get"
        fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={port}, or train.port below {low} in the inventory"
        return warn(observed, fix=fix)
    return ok(f"{low}-{high}")


_PORTS = re.compile(r"(\d{1,9})\s+(\d{1,9})\nreserved ?((?:\d{1,9}(?:-\d{1,9})?(?:,|$))*)")
DEFAULT = 29500  # torchrun's


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        if part:
            first, _, last = part.partition("-")
            yield int(first), int(last or first)
