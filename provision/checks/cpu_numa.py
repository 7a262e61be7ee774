"""cpu.numa: every GPU and network card knows its NUMA node, and the nodes are divided alike.

``numa_node`` of a PCI device is -1 where the firmware does not tell (Documentation/ABI/testing/sysfs-bus-pci); with one
NUMA node that is of no account. PCI classes: 0x0300 and 0x0302 are displays, 0x0200 and 0x0207 network and InfiniBand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, warn
from provision.checks._host import cpus, pairs, unread
from provision.checks._judging import odd
from provision.model import Finding

ID = "cpu.numa"
LEVEL = 0
TITLE = "every GPU and network card knows its NUMA node"
PROBE = """\
if [ -r /sys/devices/system/node/online ]; then echo "nodes $(cat /sys/devices/system/node/online)"; else echo "nodes 0"; fi
for device in /sys/bus/pci/devices/*; do
    [ -r "$device/numa_node" ] || continue
    case $(cat "$device/vendor" "$device/class") in
        0x10de?0x030[02]* | 0x15b3?0x020[07]*) echo "pci ${device##*/} $(cat "$device/numa_node")" ;;
    esac
done
"""
WHY = "Ranks cannot be bound beside their GPU: copies cross the socket link and lose up to half of their bandwidth."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """Devices without a NUMA node first, then the number of NUMA nodes compared."""
    numbers: dict[str, int] = {}
    for name, answer in answers.items():
        nodes = cpus(pairs(answer).get("nodes"))
        if nodes is None:
            yield unread(ID, name, answer)
            continue
        lost = [line.split()[1] for line in answer.lines if line.startswith("pci ") and line.endswith(" -1")]
        if nodes > 1 and lost:
            said = f"{nodes} NUMA nodes, and {', '.join(lost)} on none of them"
            fix = "update the firmware, or give the proximity domains of PCI devices free in its NUMA settings"
            yield warn(ID, name, said, expected="a NUMA node for every device", fix=fix)
        else:
            numbers[name] = nodes
    fix = "set NUMA nodes per socket (NPS on AMD, SNC on Intel) alike in the firmware"
    yield from odd(ID, numbers, fix=fix, show=lambda count: f"{count} NUMA node{'s' * (count != 1)}")
