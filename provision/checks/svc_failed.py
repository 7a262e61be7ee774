"""svc.failed: no unit that a training depends on has failed.

``systemctl list-units --state=failed`` (systemctl(1)); units that have nothing to do with GPUs, networks, time, file
systems or logins are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import unread
from provision.model import Finding

ID = "svc.failed"
LEVEL = 0
TITLE = "no unit that a training depends on has failed"
TOOL = "systemctl"
PROBE = "systemctl list-units --state=failed --all --no-legend --plain --no-pager && echo looked\n"
WHY = "A service that should have been up is not: a mount, the fabric manager, the subnet manager or the clock."

_OURS = re.compile(
    r"\.(mount|automount|swap)$|nvidia|opensm|openibd|rdma|ibacm|nfs|rpc|chrony|ntp|timesync|sshd?\.|docker|slurm|munge|"
    r"network|NetworkManager|dkms|lvm|mdmonitor|zfs|systemd-(networkd|logind|modules-load|sysctl|udevd)"
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with their names."""
    for name, answer in answers.items():
        if answer.rc != 0 or "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        failed = [line.removeprefix("● ").split()[0] for line in answer.lines if line != "looked"]
        ours = [unit for unit in failed if _OURS.search(unit)]
        if ours:
            fix = f"systemctl status {' '.join(ours)}; journalctl -b -u {ours[0]}"
            yield warn(ID, name, f"{', '.join(ours)} failed", expected="none", fix=fix)
        else:
            yield ok(ID, name, f"{len(failed)} failed, none of which matters" if failed else "none failed")
