"""fs.fstab: what is mounted over NFS is mounted again after a reboot.

A mount belongs to the boot when /etc/fstab names its folder or a systemd unit file does (systemd.mount(5)). Units that
systemd makes of fstab lie under /run, and do not count a second time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import many, unread
from provision.checks._mounts import mount_of, mounts
from provision.model import Finding

ID = "fs.fstab"
LEVEL = 0
TITLE = "what is mounted over NFS is mounted again after a reboot"
PROBE = """\
cat /proc/self/mounts
sed -n 's/^[[:space:]]*\\([^#[:space:]][^[:space:]]*\\)[[:space:]]\\{1,\\}\\([^[:space:]]*\\).*/boot \\2/p' /etc/fstab
for file in /etc/systemd/system/*.mount /usr/lib/systemd/system/*.mount; do
    [ ! -r "$file" ] || sed -n 's/^Where=/boot /p' "$file"
done
if [ -e /etc/auto.master ]; then echo automounter; fi
"""
WHY = "Mounted by hand it is gone after the next boot, and a training writes to the empty folder below."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with the first folder that nothing mounts at boot."""
    for name, answer in answers.items():
        table = mounts(answer)
        if mount_of(table, "/") is None:
            yield unread(ID, name, answer)
            continue
        boot = {_folder(line.removeprefix("boot ")) for line in answer.lines if line.startswith("boot ")}
        nfs = [mount for mount in table if mount.type in {"nfs", "nfs4"}]
        hand = [mount for mount in nfs if mount.target not in boot]
        if not hand or "automounter" in answer.lines:
            yield ok(ID, name, f"{many(len(nfs), 'NFS mount')}, all of the boot" if nfs else "no NFS mounts")
            continue
        fix = f"name it under services.nfs and `clusterctl deploy`, or a line for {hand[0].target} in /etc/fstab"
        yield warn(ID, name, f"{hand[0].target} was mounted by hand", expected="a line in /etc/fstab", fix=fix)


def _folder(text: str) -> str:
    plain = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
    return plain.rstrip("/") or "/"
