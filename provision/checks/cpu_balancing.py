"""cpu.balancing: the kernel does not move memory between NUMA nodes by itself.

``kernel.numa_balancing`` (Documentation/admin-guide/sysctl/kernel.rst): 0 is off. With one NUMA node it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import PROCESSORS
from provision.checks._host import cpus, number, pairs, unread
from provision.model import Finding

ID = "cpu.balancing"
LEVEL = 0
TITLE = "the kernel does not move memory between NUMA nodes by itself"
PROBE = PROCESSORS
WHY = "Pages are unmapped again and again to see who uses them: steps get slower and uneven, also for all other nodes."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where it is on and there is more than one NUMA node."""
    for name, answer in answers.items():
        told = pairs(answer)
        nodes, balancing = cpus(told.get("nodes", "0" if told else None)), number(told.get("balancing", "0"))
        if nodes is None or balancing is None:
            yield unread(ID, name, answer)
        elif "balancing" not in told:
            yield ok(ID, name, "not built into the kernel")
        elif balancing and nodes > 1:
            fix = "sysctl -w kernel.numa_balancing=0, and the same in a file of /etc/sysctl.d"
            yield warn(ID, name, f"{balancing} with {nodes} NUMA nodes", expected="0", fix=fix)
        else:
            yield ok(ID, name, "off" if not balancing else "on, but there is one NUMA node")
