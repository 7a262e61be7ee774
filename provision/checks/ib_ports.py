"""ib.ports: every node has the same number of InfiniBand ports.

sysfs: /sys/class/infiniband (Documentation/ABI/stable/sysfs-class-infiniband). PCI class 0x0207 is an InfiniBand
controller (PCI Code and ID Assignment Specification); one without a driver has no folder in /sys/class/infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, unknown
from provision.checks._infiniband import PORTS, ports
from provision.checks._judging import odd
from provision.model import Finding

ID = "ib.ports"
LEVEL = 0
TITLE = "the same number of InfiniBand ports on every node"
WHY = "NCCL gives up or falls back to TCP on the node that lacks a port, and every other node waits for it."
PROBE = PORTS + "echo \"@pci $(cat /sys/bus/pci/devices/*/class 2>/dev/null | grep -c '^0x0207')\"\n"

_PCI = re.compile(r"^@pci (\d+)$", re.MULTILINE)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Compare the numbers of ports; an adapter on the PCI bus without a driver is named on its own."""
    counts: dict[str, int] = {}
    for name, answer in answers.items():
        every = ports(answer.out)
        adapters = _PCI.search(answer.out)
        if every is None or adapters is None:
            yield unknown(ID, name, "what the node printed about its ports is not understood")
            continue
        mine = [port for port in every if port.infiniband]
        if not every and int(adapters[1]):
            yield fail(
                ID,
                name,
                f"{adapters[1]} InfiniBand adapter(s) on the PCI bus and none in /sys/class/infiniband",
                expected="a driver for every adapter",
                fix="modprobe mlx5_ib; dmesg | grep mlx5 tells why it does not start",
            )
        else:
            counts[name] = len(mine)
    if not any(counts.values()):
        yield from (not_here(ID, name, "no InfiniBand") for name in counts)
        return
    yield from odd(
        ID,
        counts,
        verdict="FAIL",
        show=lambda count: f"{count} InfiniBand port{'' if count == 1 else 's'}" if count else "no InfiniBand port",
        fix="lspci | grep -i -e infiniband -e mellanox shows whether the adapter is there; dmesg | grep mlx5 why not",
    )
