"""fs.readonly: no disk was switched to read-only, and none has recorded errors.

ext4 mounted with ``errors=remount-ro`` shows ``ro`` (new kernels: ``emergency_ro``) in the mount table after an error (ext4(5)), and counts errors in
``/sys/fs/ext4/DEVICE/errors_count`` until a file system check clears them. What /etc/fstab mounts ``ro`` is meant so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import SHOW, many, unread
from provision.checks._mounts import mount_of, mounts
from provision.model import Finding, Node
from provision.render import words

ID = "fs.readonly"
LEVEL = 0
TITLE = "no disk was switched to read-only, and none has recorded errors"
WHY = "Checkpoints and logs cannot be written any more, and what the disk holds may be damaged."

_LOCKED = frozenset({"ro", "emergency_ro", "shutdown"})  # of ext4 since Linux 6.15; of ext4 and xfs
_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mount table, what fstab mounts read-only, where a run writes, and the counters of errors."""
    return f"""\
{SHOW}\
cat /proc/self/mounts
while read -r source target type options rest; do
    case $source,,$options, in
        '#'*) ;;
        *,ro,*) echo "meant $target" ;;
    esac
done </etc/fstab
for path in / /tmp /var "$HOME" {words([str(seen.inventory.root)])}; do
    [ ! -d "$path" ] || echo "used $(readlink -f "$path")"
done
for file in /sys/fs/ext4/*/errors_count; do
    device=${{file%/errors_count}}
    show "errors ${{device##*/}}" "$file"
done
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for a disk that is read-only, WARN for errors."""
    for name, answer in answers.items():
        table = mounts(answer)
        used = [line.removeprefix("used ") for line in answer.lines if line.startswith("used ")]
        below = [mount for path in used if (mount := mount_of(table, path))]
        meant = {line.removeprefix("meant ") for line in answer.lines if line.startswith("meant ")}
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
            if count.isdigit() and count != "0"
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
