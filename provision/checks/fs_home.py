"""fs.home: the home folder is local and takes files.

Caches that programs keep below ~ (Triton, Inductor, torch extensions) are locked with flock(2), which waits or fails
over a network. ``clusterctl train`` keeps them on the local disk; other jobs do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import pairs, unread
from provision.checks.kit.mounts import NETWORK, folders, lies
from provision.model import Finding, Node

ID = "fs.home"
LEVEL = 0
TITLE = "the home folder is local and takes files"
WHY = "Ranks that compile wait for one another's locks over the network, or fail where there is no home at all."


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001
    """The mounts, and where the folders lie."""
    return folders(seen)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL where it is missing or read-only, WARN where it lies on a network file system."""
    for name, answer in answers.items():
        told = pairs(answer)
        home, user = told.get("home"), seen.user or "USER"
        mount = lies(answer, home)
        if home is None:
            yield unread(ID, name, answer)
        elif mount is None:
            fix = f"as root: mkdir -m 700 {home} && chown {user} {home}"
            yield fail(ID, name, f"{home} does not exist", expected="a home folder", fix=fix)
        elif "writes" not in told:
            yield fail(ID, name, f"{home} takes no files", expected="it does", fix=f"as root: chown {user} {home}")
        elif mount.type in NETWORK:
            fix = "for jobs that you start by hand: export TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to a local disk"
            yield warn(ID, name, f"{home} lies on {mount.type} of {mount.source}", expected="a local disk", fix=fix)
        else:
            yield ok(ID, name, f"{home} on {mount.type}")
