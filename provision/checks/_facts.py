"""What several checks ask a node in one probe: its session, memory, processors and system.

Checks with the same probe share its answer, and the shell reads files of a few lines itself: to start a program costs
more, and a hundred nodes may be asked at once from a small machine.
"""

SHOW = """\
show() {
    [ ! -r "$2" ] || { read -r value <"$2"; echo "$1 $value"; }
}
"""

# What binds the processes of this session: getrlimit(2), capabilities, control groups; and whether there are RDMA
# devices. ``group V1-CONTROLLER V2-FILE V1-FILE`` tells a limit of every group around the session, the innermost first:
# a hybrid system has the controller of version 1 in a hierarchy of its own.
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
