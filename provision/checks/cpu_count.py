"""cpu.count: every processor is online, as many as on the other nodes.

``present``, ``online`` and ``smt/control`` of /sys/devices/system/cpu (ABI/testing/sysfs-devices-system-cpu). Where
SMT is switched off the second threads are present and offline on purpose.
"""

from provision.checks.kit import PROCESSORS, Answers, Judgements, cpus, many, odd, pairs, unread, warn

TITLE = "every processor is online, as many as on the other nodes"
PROBE = PROCESSORS
WHY = "A node with fewer processors feeds its GPUs more slowly, and every other node waits for it in every step."


def judge(answers: Answers) -> Judgements:
    """Offline processors first, then their number compared."""
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
