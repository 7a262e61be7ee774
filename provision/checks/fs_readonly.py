"""fs.readonly: no disk was switched to read-only, and none has recorded errors.

ext4 mounted with ``errors=remount-ro`` shows ``ro`` in the mount table after an error (ext4(5)), with a new kernel
``emergency_ro`` (seen with 6.18), and counts errors in ``/sys/fs/ext4/DEVICE/errors_count`` until a file system check
clears them. What /etc/fstab mounts ``ro`` is meant so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import many, unread
from provision.checks.kit.mounts import folders, mount_of, mounts, plain
from provision.model import Finding, Node

ID = "fs.readonly"
LEVEL = 0
TITLE = "no disk was switched to read-only, and none has recorded errors"
WHY = "Checkpoints and logs cannot be written any more, and what the disk holds may be damaged."

_LOCKED = frozenset({"ro", "emergency_ro", "shutdown"})
_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mounts, and where the folders lie."""
    return folders(seen)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for a disk that is read-only, WARN for errors."""
    for name, answer in answers.items():
        table = mounts(answer)
        used = [line.rpartition(" ")[2] for line in answer.lines if line.startswith("lies ")]
        below = [mount for path in used if (mount := mount_of(table, path))]
        boot = (line.split() for line in answer.lines if line.startswith("fstab "))
        meant = {plain(each[2]) for each in boot if len(each) > 4 and "ro" in each[4].split(",")}
        if not below:
            yield unread(ID, name, answer)
            continue
        locked = [
            each for each in below if each.type in _DISK and _LOCKED & {*each.options} and each.target not in meant
        ]
        counts = [line.split() for line in answer.lines if line.startswith("errors ")]
        wrong = [
            (device, count)
            for _, device, count in (each for each in counts if len(each) == 3)
            if count.isdecimal() and count != "0"
        ]
        if locked:
            mount = locked[0]
            fix = f"see dmesg and smartctl -a {mount.source}; fsck it unmounted, replace a failing disk"
            yield fail(ID, name, f"{mount.target} ({mount.source}) is read-only", expected="writable", fix=fix)
        elif wrong:
            said = ", ".join(f"{many(int(count), 'error')} on {device}" for device, count in wrong)
            fix = f"see dmesg and smartctl -a /dev/{wrong[0][0]}; fsck -f it unmounted"
            yield warn(ID, name, said, expected="none", fix=fix)
        else:
            yield ok(ID, name, "all writable, no errors")
