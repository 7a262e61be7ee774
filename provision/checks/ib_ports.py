"""ib.ports: every node has the same number of InfiniBand ports.

sysfs: /sys/class/infiniband (Documentation/ABI/stable/sysfs-class-infiniband). PCI class 0x0207 is an InfiniBand
controller (PCI Code and ID Assignment Specification); one without a driver has no folder in /sys/class/infiniband.
"""

import re

from provision.checks.kit import Answers, Judgements, fail, not_here, odd, unknown
from provision.checks.kit.infiniband import PORTS, ports

TITLE = "the same number of InfiniBand ports on every node"
WHY = "NCCL gives up or falls back to TCP on the node that lacks a port, and every other node waits for it."
PROBE = PORTS + "echo \"@pci $(cat /sys/bus/pci/devices/*/class 2>/dev/null | grep -c '^0x0207')\"\n"

_PCI = re.compile(r"^@pci (\d+)$", re.MULTILINE)


def judge(answers: Answers) -> Judgements:
    """Compare the numbers of ports; an adapter on the PCI bus without a driver is named on its own."""
    counts: dict[str, int] = {}
    for name, answer in answers.items():
        every = ports(answer.out)
        adapters = _PCI.search(answer.out)
        if every is None or adapters is None:
            yield name, unknown("what the node printed about its ports is not understood")
            continue
        mine = [port for port in every if port.infiniband]
        if not every and int(adapters[1]):
            yield (
                name,
                fail(
                    f"{adapters[1]} InfiniBand adapter(s) on the PCI bus and none in /sys/class/infiniband",
                    expected="a driver for every adapter",
                    fix="modprobe mlx5_ib; dmesg | grep mlx5 tells why it does not start",
                ),
            )
        else:
            counts[name] = len(mine)
    if not any(counts.values()):
        yield from ((name, not_here("no InfiniBand")) for name in counts)
        return
    yield from odd(
        counts,
        verdict="FAIL",
        show=lambda count: f"{count} InfiniBand port{'' if count == 1 else 's'}" if count else "no InfiniBand port",
        fix="lspci | grep -i -e infiniband -e mellanox shows whether the adapter is there; dmesg | grep mlx5 why not",
    )
