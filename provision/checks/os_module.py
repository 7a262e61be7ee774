"""os.module: the running kernel has a module of the GPU driver on disk.

modinfo(8) finds it for the running kernel wherever the distribution or DKMS put it. What is loaded may lie nowhere any
more; it will not come back after the next boot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, ok, unknown, warn
from provision.checks._facts import GPUS, SHOW
from provision.checks._host import number, pairs, unread
from provision.model import Finding

ID = "os.module"
LEVEL = 0
TITLE = "the running kernel has a module of the GPU driver"
PROBE = (
    SHOW
    + GPUS
    + """\
show kernel /proc/sys/kernel/osrelease
show loaded /sys/module/nvidia/version
if [ "$gpus" = 0 ]; then
    :
elif ! command -v modinfo >/dev/null 2>&1; then
    echo "modinfo absent"
elif version=$(modinfo -F version nvidia 2>/dev/null); then
    echo "disk $version"
fi
"""
)
WHY = "After a kernel update without its module the node has no GPU: every rank there fails when CUDA starts."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL where there is none, WARN where it is only in memory."""
    for name, answer in answers.items():
        told = pairs(answer)
        gpus, kernel, loaded = number(told.get("gpus")), told.get("kernel", ""), told.get("loaded")
        if gpus is None:
            yield unread(ID, name, answer)
        elif gpus == 0:
            yield not_here(ID, name, "no GPU")
        elif "disk" in told:
            yield ok(ID, name, f"{told['disk']} for {kernel}")
        elif "modinfo" in told:
            yield unknown(ID, name, "modinfo is not installed", fix=f"install kmod on {name}")
        elif loaded:
            said = f"{loaded} is loaded, but {kernel} has no module on disk"
            fix = "install the driver's module for this kernel again (dkms autoinstall) before the node is rebooted"
            yield warn(ID, name, said, expected=f"a module for {kernel}", fix=fix)
        else:
            fix = f"dkms autoinstall -k {kernel}, or boot the kernel that the module was built for"
            yield fail(ID, name, f"no nvidia module for {kernel}", expected=f"a module for {kernel}", fix=fix)
