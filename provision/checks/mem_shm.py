"""mem.shm: /dev/shm has room for the tensors that processes share.

PyTorch's data loader workers and NCCL's transport inside a node lay their buffers there. A tmpfs without a ``size``
holds half of the memory (tmpfs(5)); containers often get 64 MiB.
"""

import math

from provision.checks.kit import GIB, GPUS, Answers, Judgements, Plan, df, fail, human, number, ok, unread, warn
from provision.checks.kit.mounts import mounts

TITLE = "shared memory has room for the tensors that processes share"
PROBE = (
    GPUS
    + """\
while read -r line; do
    case $line in *" /dev/shm "*) echo "$line" ;; esac
done </proc/self/mounts
df -Pk /dev/shm
"""
)
LIMITS = {"size_gib": 8, "size_gib_per_gpu": 1, "free_gib_least": 1}
WHY = "Data loaders and NCCL die with 'Bus error' or 'No space left on device' when shared memory is full."

_SHM = "/dev/shm"  # noqa: S108 - it is looked at, nothing is put there


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL when it is not there or nearly full, WARN when it is small."""
    nodes = {node.name: node for node in seen.nodes}
    for name, answer in answers.items():
        room = df(answer)
        gpus = next((number(line[5:]) for line in answer.lines if line.startswith("gpus ")), None)
        if room is None or gpus is None:
            yield name, unread(answer)
            continue
        size, free = room[0] * 1024, room[1] * 1024
        gpus = (nodes[name].gpus if name in nodes else None) or gpus
        wanted = GIB * max(seen.limits["size_gib"], seen.limits["size_gib_per_gpu"] * gpus)
        observed = f"{human(size)}, {human(free)} free"
        large = f"{math.ceil(wanted / GIB)}G"
        remount = f"put `limits: {{shm: {large}}}` under `services` in the inventory, and `clusterctl deploy`"
        if not any(mount.target == _SHM for mount in mounts(answer)):
            observed = f"{_SHM} is not a separate file system"
            yield (
                name,
                fail(observed, expected="a tmpfs", fix="mount -t tmpfs tmpfs /dev/shm, and a line in /etc/fstab"),
            )
        elif free < seen.limits["free_gib_least"] * GIB and size >= wanted:
            expected = f"{seen.limits['free_gib_least']:g} GiB free"
            yield name, fail(observed, expected=expected, fix="see what fills it: ls -lS /dev/shm")
        elif free < seen.limits["free_gib_least"] * GIB:
            yield name, fail(observed, expected=f"a size of {human(wanted)}", fix=remount)
        elif size < wanted:
            yield name, warn(observed, expected=f"a size of {human(wanted)}", fix=remount)
        else:
            yield name, ok(observed)
