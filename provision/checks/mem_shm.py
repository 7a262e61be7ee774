"""mem.shm: /dev/shm has room for the tensors that processes share.

PyTorch's data loader workers and NCCL's transport inside a node lay their buffers there. A tmpfs without a ``size``
holds half of the memory (tmpfs(5)); containers often get 64 MiB. 1 GiB for each GPU, and 8 GiB at least, is a rule of
thumb for eight loader workers a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import GIB, human, mount_of, mounts, number, unread
from provision.model import Finding

ID = "mem.shm"
LEVEL = 0
TITLE = "/dev/shm has room for the tensors that processes share"
PROBE = """\
grep ' /dev/shm ' /proc/self/mounts
df -Pk /dev/shm | sed -n '2s/^/df /p'
gpus=0
for device in /sys/bus/pci/devices/*; do
    if [ -r "$device/vendor" ] && [ "$(cat "$device/vendor")" = 0x10de ]; then
        case $(cat "$device/class") in 0x030[02]*) gpus=$((gpus + 1)) ;; esac
    fi
done
echo "gpus $gpus"
"""
LIMITS = {"size_gib": 8, "size_gib_per_gpu": 1, "free_gib_least": 1}
WHY = "Data loaders and NCCL die with 'Bus error' or 'No space left on device' when shared memory is full."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL when it is not there or nearly full, WARN when it is small."""
    nodes = {node.name: node for node in seen.nodes}
    for name, answer in answers.items():
        fields = next((line.split() for line in answer.lines if line.startswith("df ")), [])
        gpus = next((number(line[5:]) for line in answer.lines if line.startswith("gpus ")), None)
        if len(fields) < 6 or not (fields[2].isdigit() and fields[4].isdigit()) or gpus is None:
            yield unread(ID, name, answer)
            continue
        size, free = int(fields[2]) * 1024, int(fields[4]) * 1024
        gpus = (nodes[name].gpus if name in nodes else None) or gpus
        wanted = GIB * max(seen.limits["size_gib"], seen.limits["size_gib_per_gpu"] * gpus)
        said = f"{human(size)}, {human(free)} free"
        remount = f"mount -o remount,size={wanted / GIB:.0f}G /dev/shm, and the same size in its line of /etc/fstab"
        if mount_of(mounts(answer), "/dev/shm") is None:
            said = "/dev/shm is no file system of its own"
            yield fail(
                ID, name, said, expected="a tmpfs", fix="mount -t tmpfs tmpfs /dev/shm, and a line in /etc/fstab"
            )
        elif free < seen.limits["free_gib_least"] * GIB and size >= wanted:
            expected = f"{seen.limits['free_gib_least']:g} GiB free"
            yield fail(ID, name, said, expected=expected, fix="see what fills it: ls -lS /dev/shm")
        elif free < seen.limits["free_gib_least"] * GIB:
            yield fail(ID, name, said, expected=f"a size of {human(wanted)}", fix=remount)
        elif size < wanted:
            yield warn(ID, name, said, expected=f"a size of {human(wanted)}", fix=remount)
        else:
            yield ok(ID, name, said)
