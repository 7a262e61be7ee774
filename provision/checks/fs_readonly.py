"""fs.readonly: no disk was switched to read-only, and none has recorded errors.

ext4 mounted with ``errors=remount-ro`` shows ``ro`` in the mount table after an error (ext4(5)), and counts errors in
``/sys/fs/ext4/DEVICE/errors_count`` until a file system check clears them. What /etc/fstab itself mounts ``ro`` is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import mount_of, mounts, unread
from provision.model import Finding, Node
from provision.render import words

ID = "fs.readonly"
LEVEL = 0
TITLE = "no disk was switched to read-only, and none has recorded errors"
WHY = "Checkpoints and logs cannot be written any more, and what the disk holds may be damaged."

_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mount table, what fstab means to be read-only, where the folders lie that a run writes to, and the counters."""
    return f"""\
cat /proc/self/mounts
sed -n 's/^[[:space:]]*[^#[:space:]][^[:space:]]*[[:space:]]\\{{1,\\}}\\([^[:space:]]*\\)[[:space:]]\\{{1,\\}}[^[:space:]]*[[:space:]]\\{{1,\\}}\\(.*,\\)*ro[,[:space:]].*/meant \\1/p' \
/etc/fstab 2>/dev/null
for path in / /tmp /var "$HOME" {words([str(seen.inventory.root)])}; do
    [ ! -d "$path" ] || echo "used $(readlink -f "$path")"
done
for file in /sys/fs/ext4/*/errors_count; do
    [ ! -r "$file" ] || {{ device=${{file%/*}}; echo "errors ${{device##*/}} $(cat "$file")"; }}
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
        locked = [each for each in below if each.type in _DISK and "ro" in each.options and each.target not in meant]
        counts = [line.split() for line in answer.lines if line.startswith("errors ")]
        wrong = [(device, count) for _, device, count in (each for each in counts if len(each) == 3) if count != "0"]
        if locked:
            mount = locked[0]
            fix = f"see dmesg and smartctl -a {mount.source}; fsck it unmounted, replace a failing disk"
            yield fail(ID, name, f"{mount.target} ({mount.source}) is read-only", expected="writable", fix=fix)
        elif wrong:
            said = ", ".join(f"{count} errors on {device}" for device, count in wrong)
            fix = f"see dmesg and smartctl -a /dev/{wrong[0][0]}; fsck -f it unmounted"
            yield warn(ID, name, said, expected="none", fix=fix)
        else:
            yield ok(ID, name, "all writable, no errors")
