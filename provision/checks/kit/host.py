"""Facts about a node that several checks read: the probes, and functions that parse their answers. Pure.

Checks with the same probe share one run of it. The shell reads short files itself, because starting a program costs a
millisecond, and one small machine may ask a hundred nodes at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Hashable
from typing import TypeVar

from provision.checks import Answer, Answers, Judgement, unknown

SHOW = """\
show() {
    [ ! -r "$2" ] || { read -r value <"$2"; echo "$1 $value"; }
}
"""

# The limits of this session's processes: getrlimit(2), capabilities, control groups; and whether there are RDMA
# devices. ``group V1-CONTROLLER V2-FILE V1-FILE`` prints a limit of every group around the session, innermost first: a
# hybrid system has the controller of version 1 in a separate hierarchy.
_GROUP = """\
group() {
    path=
    base=/sys/fs/cgroup
    while IFS=: read -r number controllers at; do
        case $number:,$controllers, in
            0:*) [ ! -e "$base/cgroup.controllers" ] || { path=$at file=$2; } ;;
            *,"$1",*) [ -e "$base/cgroup.controllers" ] || { path=$at base=$base/$1 file=$3; } ;;
        esac
    done </proc/self/cgroup
    if [ -n "$path" ] && [ -d "$base" ]; then
        echo "group $path"
        path=${path%/}
        while :; do
            show "at ${path:-/}" "$base$path/$file"
            [ -n "$path" ] || break
            path=${path%/*}
        done
    fi
}
"""

SESSION = (
    SHOW
    + _GROUP
    + """\
while read -r line; do
    case $line in "Max processes"* | "Max open files"* | "Max locked memory"*) echo "$line" ;; esac
done </proc/self/limits
while read -r key value; do
    case $key in CapEff:) echo "$key $value" ;; esac
done </proc/self/status
for device in /sys/class/infiniband/*; do
    [ ! -e "$device" ] || echo "device ${device##*/}"
done
group pids pids.max pids.max
"""
)

# Memory, and what befell it. EDAC's counters exist where the kernel watches the memory controllers.
MEMORY = (
    SHOW
    + _GROUP
    + """\
grep -hE '^(Mem(Total|Available)|Swap(Total|Free)|HugePages_Total|Hugepagesize|Hugetlb):|^oom_kill ' \\
    /proc/meminfo /proc/vmstat
if [ -e /sys/kernel/mm/transparent_hugepage ]; then
    show huge /sys/kernel/mm/transparent_hugepage/enabled
else
    echo "huge [absent]"
fi
for file in /sys/devices/system/edac/mc/mc*/[uc]e_count; do
    show "edac ${file#/sys/devices/system/edac/mc/}" "$file"
done
while read -r key rest; do
    case $key:$rest in
        flags:*\\ hypervisor*) echo virtual ;;
        flags:* | :) break ;;
    esac
done </proc/cpuinfo
group memory memory.max memory.limit_in_bytes
"""
)

# Processors, NUMA nodes, and where GPUs and network cards are. PCI classes: 0x0300 and 0x0302 are displays, 0x0200 and
# 0x0207 network and InfiniBand. ``governor COUNT NAME`` stands for neighbours with the same one.
PROCESSORS = (
    SHOW
    + """\
while read -r line; do
    case $line in
        "model name"* | "CPU implementer"* | "CPU part"*) echo "$line" ;;
        "") break ;;
    esac
done </proc/cpuinfo
show present /sys/devices/system/cpu/present
show online /sys/devices/system/cpu/online
show smt /sys/devices/system/cpu/smt/control
show nodes /sys/devices/system/node/online
show balancing /proc/sys/kernel/numa_balancing
show load /proc/loadavg
while read -r key value; do
    case $key in Cpus_allowed_list:) echo "$key $value" ;; esac
done </proc/self/status
count=0
for file in /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor; do
    [ -r "$file" ] || continue
    read -r value <"$file"
    if [ "$count" != 0 ] && [ "$value" != "$governor" ]; then
        echo "governor $count $governor"
        count=0
    fi
    governor=$value
    count=$((count + 1))
done
[ "$count" = 0 ] || echo "governor $count $governor"
for device in /sys/bus/pci/devices/*; do
    [ -r "$device/numa_node" ] || continue
    read -r vendor <"$device/vendor"
    read -r class <"$device/class"
    case $vendor$class in
        0x10de0x030[02]* | 0x15b30x020[07]*) show "pci ${device##*/}" "$device/numa_node" ;;
    esac
done
"""
)

# The system: kernel, distribution, user. A number below /proc/sys ends after one byte where it is read byte by byte, as
# dash does.
SYSTEM = (
    SHOW
    + """\
show kernel /proc/sys/kernel/osrelease
echo "taint $(cat /proc/sys/kernel/tainted)"
if [ -e /sys/fs/selinux/enforce ]; then show selinux /sys/fs/selinux/enforce; else echo "selinux off"; fi
while read -r key value rest; do
    case $key in Uid: | Gid:) echo "$key $value" ;; esac
done </proc/self/status
id=
version=rolling
if [ -r /etc/os-release ]; then
    while IFS='=' read -r key value; do
        value=${value#[\\"\\']}
        value=${value%[\\"\\']}
        case $key in
            ID) id=$value ;;
            VERSION_ID) version=$value ;;
        esac
    done </etc/os-release
fi
[ -z "$id" ] || echo "release $id $version"
for file in /boot/vmlinuz-*; do
    case $file in *rescue* | *'*') ;; *) echo "installed ${file#/boot/vmlinuz-}" ;; esac
done
[ ! -e /run/reboot-required ] || echo "reboot required"
"""
)

GPUS = """\
gpus=0
for device in /sys/bus/pci/devices/*; do
    [ -r "$device/vendor" ] || continue
    read -r vendor <"$device/vendor"
    read -r class <"$device/class"
    case $vendor$class in 0x10de0x030[02]*) gpus=$((gpus + 1)) ;; esac
done
echo "gpus $gpus"
"""


T = TypeVar("T", bound=Hashable)

GIB = 1 << 30


# --- lines ---------------------------------------------------------------------------------------


def pairs(answer: Answer) -> dict[str, str]:
    """Lines of ``key value`` as a mapping; ``key: value`` as well. Of equal keys the last one counts."""
    split = (line.replace("\t", " ").partition(" ") for line in answer.lines)
    return {key.removesuffix(":"): value.strip() for key, _, value in split}


def number(text: str | None) -> int | None:
    """A whole number, or None."""
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def kib(text: str | None) -> int | None:
    """The bytes of a ``/proc/meminfo`` value such as ``24684084 kB``, or None."""
    amount = number((text or "").removesuffix("kB").strip())
    return None if amount is None else amount * 1024


def human(size: float) -> str:
    """Bytes as text: ``25.3 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def many(count: int, one: str, several: str = "") -> str:
    """A count with its noun: ``1 file``, ``3 files``."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def cpus(text: str | None) -> int | None:
    """How many there are in a kernel's list such as ``0-31,64``, or None."""
    if text is None or not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
        return None
    ends = ((part.split("-")[0], part.split("-")[-1]) for part in text.split(","))
    return sum(int(last) - int(first) + 1 for first, last in ends)


def df(answer: Answer) -> tuple[int, int] | None:
    """Size and what is free in the output of ``df -P`` (POSIX) for one folder, in its units; None where it has none."""
    found = re.search(r"^\S.* ([0-9]{1,20}) +[0-9]+ +([0-9]{1,20}) +(?:-|[0-9]+%) +/", answer.out, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def soft_limit(answer: Answer, name: str) -> str | None:
    """The soft limit in a line of ``/proc/self/limits``: ``unlimited``, a whole number, or None."""
    found = re.search(rf"^Max {name} +(unlimited|[0-9]{{1,20}}) ", answer.out, re.MULTILINE)
    return found[1] if found else None


def may(answer: Answer, capability: int) -> bool:
    """Whether the ``CapEff`` line has a capability; ``<linux/capability.h>`` has their numbers."""
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", answer.out, re.MULTILINE)
    return bool(found and int(found[1], 16) >> capability & 1)


def unread(answer: Answer) -> Judgement:
    """UNKNOWN, with the first line of what the node printed instead."""
    first = (answer.err.strip() or answer.out.strip() or "nothing").splitlines()[0][:120]
    return unknown(f"the answer cannot be read: {first}")


def read_all(
    answers: Answers, read: Callable[[Answer], T | None]
) -> Generator[tuple[str, Judgement], None, dict[str, T]]:
    """The value of every node, by its name; UNKNOWN for each node whose answer has none."""
    values: dict[str, T] = {}
    for name, answer in answers.items():
        value = read(answer)
        if value is None:
            yield name, unread(answer)
        else:
            values[name] = value
    return values


def tightest(answer: Answer) -> tuple[str, int] | None:
    """The control group with the lowest limit, and that limit; None where nothing is limited."""
    fields = (line.split() for line in answer.lines if line.startswith("at "))
    found = [(each[1], int(each[2])) for each in fields if len(each) == 3 and each[2].isdecimal()]  # not "max"
    return min(found, key=lambda limit: limit[1], default=None)


def unit_of(group: str) -> str:
    """The systemd unit of a control group."""
    return group.rstrip("/").rpartition("/")[2] or "-.slice"
