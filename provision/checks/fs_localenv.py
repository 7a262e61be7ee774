"""fs.localenv: the releases lie on a local disk.

The type of the file system in /proc/self/mounts. A cold ``import torch`` opens some thousand small files, and every
rank of every node does it at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import pairs, unread
from provision.checks.kit.mounts import NETWORK, folders, lies
from provision.model import Finding, Node

ID = "fs.localenv"
LEVEL = 0
TITLE = "the releases lie on a local disk"
WHY = (
    "All ranks read thousands of small files from one server: a start takes minutes, and a slow server stops them all."
)

_MEMORY = frozenset({"tmpfs", "ramfs"})


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mounts, and where the folders lie."""
    return folders(seen)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN for a network file system, and for one in memory."""
    for name, answer in answers.items():
        mount = lies(answer, pairs(answer).get("at"))
        if mount is None:
            yield unread(ID, name, answer)
        elif mount.type in NETWORK:
            said = f"{seen.inventory.root} lies on {mount.type} of {mount.source}"
            fix = "choose a `prefix` on a local disk: clusterctl sends the environment to every node by itself"
            yield warn(ID, name, said, expected="a local disk", fix=fix)
        elif mount.type in _MEMORY:
            said = f"{seen.inventory.root} lies in memory ({mount.type})"
            fix = "choose a `prefix` on a disk: what lies there takes memory, and is gone after a reboot"
            yield warn(ID, name, said, expected="a local disk", fix=fix)
        else:
            yield ok(ID, name, f"{mount.type} of {mount.source}")
