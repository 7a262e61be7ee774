"""fs.noexec: programs may run where the releases lie.

A file system mounted ``noexec`` refuses to execute a file and to map its code (mount(8)): neither Python nor its
libraries start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import pairs, unread
from provision.checks.kit.mounts import folders, lies
from provision.model import Finding, Node

ID = "fs.noexec"
LEVEL = 0
TITLE = "programs may run where the releases lie"
WHY = "The environment's Python cannot start: 'Permission denied' for a file that has all its mode bits."


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mounts, and where the folders lie."""
    return folders(seen)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for a mount with noexec."""
    for name, answer in answers.items():
        mount = lies(answer, pairs(answer).get("at"))
        if mount is None:
            yield unread(ID, name, answer)
        elif "noexec" in mount.options:
            fix = f"mount -o remount,exec {mount.target}, and take noexec out of its line in /etc/fstab"
            yield fail(ID, name, f"{mount.target} is mounted noexec", expected="exec", fix=fix)
        else:
            yield ok(ID, name, f"{mount.target} allows it")
