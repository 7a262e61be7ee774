"""cpu.numa: every GPU and network card knows its NUMA node, and the nodes are divided alike.

``numa_node`` of a PCI device is -1 where the firmware does not report it (Documentation/ABI/testing/sysfs-bus-pci).
With a single NUMA node this does not matter.
"""

from provision.checks.kit import PROCESSORS, Answers, Judgements, cpus, many, odd, pairs, unread, warn

TITLE = "every GPU and network card knows its NUMA node"
PROBE = PROCESSORS
WHY = "Ranks cannot be bound beside their GPU: their copies cross the link between sockets, which is slower."


def judge(answers: Answers) -> Judgements:
    """Devices without a NUMA node first, then the number of NUMA nodes compared."""
    numbers: dict[str, int] = {}
    for name, answer in answers.items():
        nodes = cpus(pairs(answer).get("nodes", "0" if answer.lines else None))
        if nodes is None:
            yield name, unread(answer)
            continue
        lost = [line.split()[1] for line in answer.lines if line.startswith("pci ") and line.endswith(" -1")]
        if nodes > 1 and lost:
            observed = f"{nodes} NUMA nodes, and {', '.join(lost)} on none of them"
            fix = "update the firmware, or give the proximity domains of PCI devices free in its NUMA settings"
            yield name, warn(observed, expected="a NUMA node for every device", fix=fix)
        else:
            numbers[name] = nodes
    fix = "set NUMA nodes per socket (NPS on AMD, SNC on Intel) alike in the firmware"
    yield from odd(numbers, fix=fix, show=lambda count: many(count, "NUMA node"))
