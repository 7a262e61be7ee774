"""Processors: the checks."""

import re
from collections import Counter
from collections.abc import Mapping

from provision.checks.kit import (
    PROCESSORS,
    Answer,
    Answers,
    Judgement,
    Judgements,
    Level,
    cpus,
    each_node,
    equal,
    many,
    number,
    odd,
    ok,
    pairs,
    threshold,
    unread,
    warn,
)


@each_node(
    "cpu.allowed",
    "a session may use every processor",
    probe=PROCESSORS,
    why="All ranks and data loaders of the node share the few processors that are allowed, and the GPUs wait for data.",
)
def allowed(answer: Answer) -> Judgement:
    """WARN where fewer are allowed than online.

    ``Cpus_allowed_list`` of /proc/self/status (proc_pid_status(5)) is the affinity within the session's cpuset.
    """
    values = pairs(answer)
    allowed, online = cpus(values.get("Cpus_allowed_list")), cpus(values.get("online"))
    if allowed is None or online is None:
        return unread(answer)
    if allowed >= online:
        return ok(f"all {online}")
    fix = "look for CPUAffinity= or AllowedCPUs= in sshd's unit and user.slice, and isolcpus= in /proc/cmdline"
    return warn(f"{values['Cpus_allowed_list']} of {values['online']}", expected=f"all {online} CPUs", fix=fix)


@each_node(
    "cpu.balancing",
    "the kernel does not move memory between NUMA nodes automatically",
    probe=PROCESSORS,
    why=(
        "Pages are unmapped again and again to see who uses them: steps get slower and uneven, also for "
        "all other nodes."
    ),
)
def balancing(answer: Answer) -> Judgement:
    """WARN where it is on and there is more than one NUMA node.

    ``kernel.numa_balancing`` (Documentation/admin-guide/sysctl/kernel.rst): 0 is off. With one NUMA node it does
    nothing.
    """
    values = pairs(answer)
    nodes, balancing = cpus(values.get("nodes", "0" if values else None)), number(values.get("balancing", "0"))
    if nodes is None or balancing is None:
        return unread(answer)
    if "balancing" not in values:
        return ok("not built into the kernel")
    if balancing and nodes > 1:
        fix = "sysctl -w kernel.numa_balancing=0, and the same in a file of /etc/sysctl.d"
        return warn(f"{balancing} with {nodes} NUMA nodes", expected="0", fix=fix)
    return ok("off" if not balancing else "on, but there is one NUMA node")


@each_node(
    "cpu.gov",
    "the processors run at full speed",
    probe=PROCESSORS,
    why="One CPU thread launches the kernels of a GPU: at a low clock the GPU waits for it between short kernels.",
)
def gov(answer: Answer) -> Judgement:
    """WARN where any CPU has another governor than performance.

    The governor in ``cpufreq/scaling_governor`` of every CPU (Documentation/admin-guide/pm/cpufreq.rst). Virtual
    machines, and machines whose firmware holds the clock, have no such file.
    """
    counts: Counter[str] = Counter()
    for line in answer.lines:
        if found := re.fullmatch(r"governor ([0-9]+) (\S+)", line):
            counts[found[2]] += int(found[1])
    if "online" not in pairs(answer):
        return unread(answer)
    slow = [f"{many(count, 'CPU')} {governor}" for governor, count in counts.items() if governor != "performance"]
    if slow:
        fix = "cpupower frequency-set -g performance, and a unit or tuned profile that does it at boot"
        return warn(", ".join(slow), expected="performance", fix=fix)
    return ok("performance" if counts else "the system does not scale the clock")


_MODEL = frozenset({"model name", "CPU implementer", "CPU part"})


def _model(answer: Answer) -> str | None:
    lines = (line.partition(":") for line in answer.lines)
    return " ".join(value.strip() for key, _, value in lines if key.strip() in _MODEL) or None


def _load(answer: Answer, limits: Mapping[str, float]) -> Level | None:
    facts = pairs(answer)
    load, count = re.match(r"[0-9]+\.[0-9]+", facts.get("load", "")), cpus(facts.get("online"))
    if load is None or not count:
        return None
    allowed = f"at most {limits['busy_percent'] * count / 100:g}"
    return Level(100 * float(load[0]) / count, f"load {load[0]} on {count} CPUs", expected=allowed)


@each_node(
    "cpu.count",
    "every processor is online, as many as on the other nodes",
    probe=PROCESSORS,
    why="A node with fewer processors feeds its GPUs more slowly, and every other node waits for it in every step.",
)
def count(answers: Answers) -> Judgements:
    """Offline processors first, then their number compared.

    ``present``, ``online`` and ``smt/control`` of /sys/devices/system/cpu (ABI/testing/sysfs-devices-system-cpu). Where
    SMT is switched off the second threads are present and offline on purpose.
    """
    numbers: dict[str, int] = {}
    for name, answer in answers.items():
        facts = pairs(answer)
        present, online = cpus(facts.get("present")), cpus(facts.get("online"))
        if present is None or online is None:
            yield name, unread(answer)
        elif online < present and facts.get("smt") not in {"off", "forceoff"}:
            observed = f"{online} of {present} CPUs online ({facts['online']})"
            fix = "echo 1 into /sys/devices/system/cpu/cpuN/online; if it stays offline see dmesg and the firmware"
            yield name, warn(observed, expected=f"{present} CPUs", fix=fix)
        else:
            numbers[name] = online
    fix = "set hyper-threading and core counts alike in the firmware; look for maxcpus= and nosmt in /proc/cmdline"
    yield from odd(numbers, fix=fix, show=lambda count: many(count, "CPU"))


@each_node(
    "cpu.numa",
    "every GPU and network card knows its NUMA node",
    probe=PROCESSORS,
    why="Ranks cannot be bound beside their GPU: their copies cross the link between sockets, which is slower.",
)
def numa(answers: Answers) -> Judgements:
    """Devices without a NUMA node first, then the number of NUMA nodes compared.

    ``numa_node`` of a PCI device is -1 where the firmware does not report it (Documentation/ABI/testing/sysfs-bus-pci).
    With a single NUMA node this does not matter.
    """
    numbers: dict[str, int] = {}
    for name, answer in answers.items():
        nodes = cpus(pairs(answer).get("nodes", "0" if answer.lines else None))
        if nodes is None:
            yield name, unread(answer)
            continue
        devices = [line.split()[1] for line in answer.lines if line.startswith("pci ") and line.endswith(" -1")]
        if nodes > 1 and devices:
            observed = f"{nodes} NUMA nodes, and {', '.join(devices)} on none of them"
            fix = "update the firmware, or give the proximity domains of PCI devices free in its NUMA settings"
            yield name, warn(observed, expected="a NUMA node for every device", fix=fix)
        else:
            numbers[name] = nodes
    fix = "set NUMA nodes per socket (NPS on AMD, SNC on Intel) alike in the firmware"
    yield from odd(numbers, fix=fix, show=lambda count: many(count, "NUMA node"))


CHECKS = (
    equal(
        "cpu.same",
        "every node has the same model of processor",
        probe=PROCESSORS,
        read=_model,
        fix="leave the odd node out (--exclude), or pack for the older processor: pack-env --cpu-baseline",
        why=(
            "Code compiled for one processor ends with 'Illegal instruction' on an older one, and the "
            "slowest sets the pace."
        ),
        about="""
        ``model name`` of /proc/cpuinfo; on ARM, which has none, ``CPU part`` (arch/arm64/kernel/cpuinfo.c).
        """,
    ),
    threshold(
        "cpu.load",
        "no other program computes on the node",
        probe=PROCESSORS,
        read=_load,
        most="busy_percent",
        limits={"busy_percent": 50},
        fix="see who computes there: ps -eo pid,user,pcpu,stat,args --sort=-pcpu | head",
        why="Another job on one node slows every node down: all wait for the slowest in every step.",
        about="""
        The first figure of /proc/loadavg is how many tasks ran or waited for a disk, averaged over a minute
        (proc_loadavg(5)).
        """,
    ),
)
