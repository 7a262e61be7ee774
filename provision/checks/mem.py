"""Memory: the checks."""

import math
import re
from collections.abc import Mapping

from provision.checks.kit import (
    GIB,
    GPUS,
    MEMORY,
    Answer,
    Judgement,
    Level,
    Plan,
    close,
    df,
    each_node,
    equal,
    fail,
    human,
    kib,
    many,
    number,
    ok,
    pairs,
    threshold,
    tightest,
    unknown,
    unread,
    warn,
)
from provision.checks.kit.mounts import mounts


@each_node(
    "mem.cgroup",
    "the session's control group does not limit the memory",
    probe=MEMORY,
    limits={"share_percent": 90},
    why="A job started by ssh is killed at the group's limit although the machine has memory left.",
)
def cgroup(answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """The tightest group against the machine's memory.

    ``memory.max`` of every group around the session (cgroup v2, "Memory Interface Files"), ``memory.limit_in_bytes`` in
    version 1, where "no limit" is a number larger than any memory.
    """
    total = kib(pairs(answer).get("MemTotal"))
    if total is None:
        return unread(answer)
    if not any(line.startswith("group ") for line in answer.lines):
        return unknown("no control groups at /sys/fs/cgroup")
    found = tightest(answer)
    if found is None or found[1] >= total * limits["share_percent"] / 100:
        return ok("no limit")
    group, limit = found
    unit = group.rstrip("/").rpartition("/")[2] or "-.slice"
    return warn(
        f"{human(limit)} of {human(total)} in {group}",
        expected=f"at least {limits['share_percent']:g} % of the memory",
        fix=f"as root: systemctl set-property {unit} MemoryMax=infinity",
    )


@each_node(
    "mem.ecc",
    "the memory modules have no errors that ECC could not correct",
    probe=MEMORY,
    limits={"corrected": 1000},
    why="A failing module ends in a crash of the node, or of the process that held the page, in the middle of a run.",
)
def ecc(answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """FAIL for uncorrected errors, WARN for many corrected ones.

    ``ue_count`` and ``ce_count`` of ``/sys/devices/system/edac/mc/mc*`` (Documentation/admin-guide/RAS/main.rst) count
    uncorrected and corrected errors since the driver was loaded. Virtual machines have none of this.
    """
    counts = [line.split()[1:] for line in answer.lines if line.startswith("edac ")]
    if "MemTotal" not in pairs(answer) or not all(len(each) == 2 and each[1].isdecimal() for each in counts):
        return unread(answer)
    lost = sum(int(count) for file, count in counts if file.endswith("ue_count"))
    corrected = sum(int(count) for file, count in counts if file.endswith("ce_count"))
    where = ", ".join(sorted({file.partition("/")[0] for file, count in counts if count != "0"}))
    fix = "see which module: grep -H . /sys/devices/system/edac/mc/mc*/dimm*/dimm_*e_count; replace it"
    if not counts and "virtual" in answer.lines:
        return ok("a virtual machine")
    if not counts:
        return unknown("the kernel watches no memory controller", fix="load the EDAC driver of the chipset")
    if lost:
        return fail(f"{many(lost, 'uncorrected error')} at {where}", expected="none", fix=fix)
    if corrected > limits["corrected"]:
        expected = f"at most {limits['corrected']:g}"
        return warn(f"{many(corrected, 'corrected error')} at {where}", expected=expected, fix=fix)
    return ok(many(corrected, "corrected error"))


# du shows the space that a file takes, whatever its size; a map is read only when there is something to ask about.
_SHMLEFT_PROBE = """\
left=$(find /dev/shm -maxdepth 1 -type f \\( -name 'nccl-*' -o -name 'torch_*' -o -name 'psm_*' \\) -mmin +10 \\
    -exec du -k {} + 2>/dev/null)
if [ -n "$left" ]; then
    printf '%s\\n' "$left"
    grep -hs -o ' /dev/shm/[^ ]*' /proc/[0-9]*/maps | sort -u
fi
echo looked
"""
_SHM = "/dev/shm/"  # noqa: S108 - it is looked at, nothing is put there


@each_node(
    "mem.shmleft",
    "no training that crashed left its shared memory behind",
    probe=_SHMLEFT_PROBE,
    tool="find",
    why="Files left behind use memory and fill /dev/shm until the next job dies with 'Bus error'.",
)
def shmleft(answer: Answer) -> Judgement:
    """WARN with how many there are and what they hold.

    NCCL names its segments ``/dev/shm/nccl-XXXXXX`` (``src/misc/shmutils.cc``), PyTorch ``torch_<pid>_<random>_<n>``
    (``aten/src/ATen/MapAllocator.cpp``), Python's multiprocessing ``psm_XXXXXXXX``. All are removed by the process that
    made them, unless it was killed. One that a process has mapped is in use; a young one may be.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    mapped = {line for line in answer.lines if line.startswith(_SHM)}
    sizes = (re.fullmatch(r"([0-9]{1,12})\s+(/.*)", line) for line in answer.lines)
    left = {found[2]: int(found[1]) * 1024 for found in sizes if found and found[2] not in mapped}
    if not left:
        return ok(f"{len(mapped)} in use, none left behind" if mapped else "none left behind")
    observed = f"{many(len(left), 'file')} of {human(sum(left.values()))}, such as {min(left)}"
    fix = "when no training runs there: rm -f /dev/shm/nccl-* /dev/shm/torch_* /dev/shm/psm_*"
    return warn(observed, expected="none", fix=fix)


def _chosen(answer: Answer) -> str | None:
    found = re.search(r"\[([a-z]+)\]", answer.out)
    return found[1] if found else None


def _available(answer: Answer) -> Level | None:
    facts = pairs(answer)
    total, free = kib(facts.get("MemTotal")), kib(facts.get("MemAvailable"))
    if not total or free is None:
        return None
    share = 100 * free / total
    return Level(share, f"{human(free)} of {human(total)} free ({share:.0f} %)")


def _reserved(answer: Answer) -> Level | None:
    facts = pairs(answer)
    count, each = number(facts.get("HugePages_Total")), kib(facts.get("Hugepagesize"))
    reserved = kib(facts.get("Hugetlb"))
    if reserved is None and count is not None and each is not None:
        reserved = count * each
    return None if reserved is None else Level(reserved / GIB, f"{human(reserved)} in huge pages")


def _killed(answer: Answer) -> Level | None:
    count = number(pairs(answer).get("oom_kill"))
    if count is None:
        return None
    killed = f"{many(count, 'process', 'processes')} killed for lack of memory since boot"
    return Level(count, killed if count else "none killed")


def _swap(answer: Answer) -> Level | None:
    facts = pairs(answer)
    total, free = kib(facts.get("SwapTotal")), kib(facts.get("SwapFree"))
    if total is None or free is None:
        return None
    return Level(total, f"{human(total)} of swap, {human(total - free)} in use" if total else "no swap")


_SHM_PROBE = f"""\
{GPUS}\
while read -r line; do
    case $line in *" /dev/shm "*) echo "$line" ;; esac
done </proc/self/mounts
df -Pk /dev/shm
"""
_SHM_MOUNT = "/dev/shm"  # noqa: S108 - it is looked at, nothing is put there


@each_node(
    "mem.shm",
    "shared memory has room for the tensors that processes share",
    probe=_SHM_PROBE,
    limits={"size_gib": 8, "size_gib_per_gpu": 1, "free_gib_least": 1},
    why="Data loaders and NCCL die with 'Bus error' or 'No space left on device' when shared memory is full.",
)
def shm(plan: Plan, node: str, answer: Answer) -> Judgement:
    """FAIL when it is not there or nearly full, WARN when it is small.

    PyTorch's data loader workers and NCCL's transport inside a node lay their buffers there. A tmpfs without a ``size``
    holds half of the memory (tmpfs(5)); containers often get 64 MiB.
    """
    room = df(answer)
    gpus = next((number(line[5:]) for line in answer.lines if line.startswith("gpus ")), None)
    if room is None or gpus is None:
        return unread(answer)
    size, free = room[0] * 1024, room[1] * 1024
    gpus = next((each.gpus for each in plan.nodes if each.name == node), None) or gpus
    wanted = GIB * max(plan.limits["size_gib"], plan.limits["size_gib_per_gpu"] * gpus)
    observed = f"{human(size)}, {human(free)} free"
    large = f"{math.ceil(wanted / GIB)}G"
    remount = f"put `limits: {{shm: {large}}}` under `services` in the inventory, and `clusterctl deploy`"
    if not any(mount.target == _SHM_MOUNT for mount in mounts(answer)):
        observed = f"{_SHM_MOUNT} is not a separate file system"
        return fail(observed, expected="a tmpfs", fix="mount -t tmpfs tmpfs /dev/shm, and a line in /etc/fstab")
    if free < plan.limits["free_gib_least"] * GIB and size >= wanted:
        expected = f"{plan.limits['free_gib_least']:g} GiB free"
        return fail(observed, expected=expected, fix="see what fills it: ls -lS /dev/shm")
    if free < plan.limits["free_gib_least"] * GIB:
        return fail(observed, expected=f"a size of {human(wanted)}", fix=remount)
    if size < wanted:
        return warn(observed, expected=f"a size of {human(wanted)}", fix=remount)
    return ok(observed)


CHECKS = (
    equal(
        "mem.thp",
        "transparent huge pages are set alike on every node",
        probe=MEMORY,
        read=_chosen,
        fix="write the usual value to /sys/kernel/mm/transparent_hugepage/enabled, and to the kernel's command line",
        why="Copies on the host run at another speed on the odd node, and all others wait for it in every step.",
        about="""
        The word in brackets of ``/sys/kernel/mm/transparent_hugepage/enabled``
        (Documentation/admin-guide/mm/transhuge.rst). Which value is best depends on the work; nodes that differ are
        never right.
        """,
    ),
    equal(
        "mem.total",
        "every node has as much memory as the others",
        probe=MEMORY,
        read=lambda answer: kib(pairs(answer).get("MemTotal")),
        near=lambda sizes, limits: close(sizes, limits["differ_percent"] / 100),
        limits={"differ_percent": 5},
        show=human,
        fix="look for a missing module: dmidecode -t memory | grep -E 'Locator|Size'",
        why=(
            "A memory module that fell out leaves a node with less: offloading and data loaders run out of "
            "memory there first."
        ),
        about="``MemTotal`` of /proc/meminfo is what the kernel may use; equal machines differ by less than 5 %.",
    ),
    threshold(
        "mem.available",
        "most of the memory is free to use",
        probe=MEMORY,
        read=_available,
        least="free_percent",
        fail_below="free_percent_least",
        limits={"free_percent": 50, "free_percent_least": 10},
        expected="at least {limit:g} % free",
        fix="see who holds it: ps -eo pid,user,rss,args --sort=-rss | head",
        why="Something else holds the memory: loading the model or saving a checkpoint is killed for lack of it.",
        about="``MemAvailable`` of /proc/meminfo estimates what programs can get without swapping (proc_meminfo(5)).",
    ),
    threshold(
        "mem.hugepages",
        "no memory is set aside as huge pages",
        probe=MEMORY,
        read=_reserved,
        most="reserved_gib",
        limits={"reserved_gib": 0},
        expected="at most {limit:g} GiB",
        fix="sysctl -w vm.nr_hugepages=0, and take it out of /etc/sysctl.d and the kernel's command line",
        why=(
            "Reserved huge pages are memory that no training can use: it runs out although the machine "
            "seems large enough."
        ),
        about="""
        ``Hugetlb`` of /proc/meminfo is all memory in huge pages of every size; older kernels (before 4.20) report only
        ``HugePages_Total`` of the default size (Documentation/admin-guide/mm/hugetlbpage.rst).
        """,
    ),
    threshold(
        "mem.oom",
        "no process was killed for lack of memory since the node started",
        probe=MEMORY,
        read=_killed,
        expected="none",
        fix="see which: journalctl -k | grep -i 'out of memory'",
        why=(
            "What was killed for lack of memory once is killed again: often a data loader, and the ranks "
            "hang waiting for it."
        ),
        about="""
        ``oom_kill`` of /proc/vmstat counts them since boot, in control groups as well (kernel 4.13 and later). Anybody
        may read it, unlike the kernel log.
        """,
    ),
    threshold(
        "mem.swap",
        "there is no swap",
        probe=MEMORY,
        read=_swap,
        expected="none",
        fix="swapoff -a, and take it out of /etc/fstab",
        why="A rank whose memory is swapped out stalls every other rank, for minutes and without a message.",
        about="``SwapTotal`` and ``SwapFree`` of /proc/meminfo (proc_meminfo(5)).",
    ),
)
