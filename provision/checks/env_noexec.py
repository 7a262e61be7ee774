"""env.noexec: what Triton and torch compile can be loaded from where it is kept.

Compiled kernels and their launchers are shared libraries in caches below /tmp (``clusterctl train``) or in the home. A
file system mounted ``noexec`` refuses to map them (mount(8)). The releases' own folder: the check fs.noexec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import pairs, unread
from provision.checks.kit.mounts import mount_of, mounts
from provision.model import Finding

ID = "env.noexec"
LEVEL = 0
TITLE = "compiled kernels can be loaded from /tmp"
PROBE = 'cat /proc/self/mounts\necho "real $(readlink -f /tmp)"\n'
WHY = "Triton's and Inductor's kernels do not load: 'failed to map segment from shared object', minutes into the run."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for a mount with noexec."""
    for node, answer in answers.items():
        mount = mount_of(mounts(answer), pairs(answer).get("real", ""))
        if mount is None:
            yield unread(ID, node, answer)
        elif "noexec" in mount.options:
            fix = f"mount -o remount,exec {mount.target} (and in /etc/fstab), or set TRITON_CACHE_DIR in train.env"
            yield fail(ID, node, f"{mount.target} is mounted noexec", expected="exec", fix=fix)
        else:
            yield ok(ID, node, f"{mount.target} allows it")
