"""fs.inodes: the disk of the releases has room for many files.

``df -Pi`` tells how many files ext4 and others can still hold; file systems without a fixed number (btrfs) show none or
0. An environment with torch and transformers has more than 50,000 files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import df, unread
from provision.checks.kit.mounts import nearest
from provision.model import Finding, Node

ID = "fs.inodes"
LEVEL = 0
TITLE = "the disk of the releases has room for many files"
LIMITS = {"free_percent": 10, "files": 200_000}
WHY = "'No space left on device' although df shows plenty: a deploy or a cache of small files cannot go on."


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The free inodes at the releases' folder."""
    return nearest(seen.inventory.root) + 'echo "at $at"\ndf -Pi "$at"\n'


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where an environment does not fit, WARN where few are left."""
    for name, answer in answers.items():
        room = df(answer)
        if room is None:
            yield unread(ID, name, answer)
            continue
        total, free = room
        if total == 0:
            yield ok(ID, name, "no fixed number of files")
            continue
        share = 100 * free / total
        said = f"{free} of {total} inodes free ({share:.0f} %)"
        fix = f"see who has them: du --inodes -xd1 {seen.inventory.root} | sort -n; clusterctl prune"
        if free < seen.limits["files"]:
            yield fail(ID, name, said, expected=f"at least {seen.limits['files']:.0f} free", fix=fix)
        elif share < seen.limits["free_percent"]:
            yield warn(ID, name, said, expected=f"at least {seen.limits['free_percent']:g} % free", fix=fix)
        else:
            yield ok(ID, name, said)
