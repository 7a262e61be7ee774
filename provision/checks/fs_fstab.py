"""fs.fstab: what is mounted over NFS is mounted again after a reboot.

A mount belongs to the boot when /etc/fstab names its folder or a systemd unit file does (systemd.mount(5)). Units that
systemd makes of fstab lie under /run, and do not count. autofs(8) has its own files, which are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import many, unread
from provision.checks.kit.mounts import folders, mount_of, mounts, plain
from provision.model import Finding, Node

ID = "fs.fstab"
LEVEL = 0
TITLE = "what is mounted over NFS is mounted again after a reboot"
WHY = "Mounted by hand it is gone after the next boot, and a training writes to the empty folder below."


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mounts, and where the folders lie."""
    return folders(seen)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with the first folder that nothing mounts at boot."""
    for name, answer in answers.items():
        table = mounts(answer)
        if mount_of(table, "/") is None:
            yield unread(ID, name, answer)
            continue
        fields = [line.split() for line in answer.lines if line.startswith(("fstab ", "unit "))]
        boot = {plain(each[2 if each[0] == "fstab" else 1]).rstrip("/") for each in fields if len(each) > 1}
        nfs = [mount for mount in table if mount.type in {"nfs", "nfs4"}]
        hand = [mount for mount in nfs if mount.target not in boot]
        if not hand or "automounter" in answer.lines:
            yield ok(ID, name, f"{many(len(nfs), 'NFS mount')}, all of the boot" if nfs else "no NFS mounts")
            continue
        fix = f"name it under services.nfs and `clusterctl deploy`, or a line for {hand[0].target} in /etc/fstab"
        yield warn(ID, name, f"{hand[0].target} was mounted by hand", expected="a line in /etc/fstab", fix=fix)
