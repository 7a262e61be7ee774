"""System services: the checks."""

import re

from provision.checks.kit import Answer, Judgement, each_node, ok, unread, warn

_OURS = re.compile(
    r"\.(mount|automount|swap)$|nvidia|opensm|openibd|rdma|ibacm|nfs|rpc|chrony|ntp|timesync|sshd?\.|docker|slurm|munge|"
    r"network|NetworkManager|dkms|lvm|mdmonitor|zfs|systemd-(networkd|logind|modules-load|sysctl|udevd)"
)


@each_node(
    "svc.failed",
    "no unit that a training depends on has failed",
    probe="systemctl list-units --state=failed --all --no-legend --plain --no-pager && echo looked\n",
    tool="systemctl",
    why="A service that should have been up is not: a mount, the fabric manager, the subnet manager or the clock.",
)
def failed(answer: Answer) -> Judgement:
    """WARN with their names.

    ``systemctl list-units --state=failed`` (systemctl(1)); units that have nothing to do with GPUs, networks, time,
    file systems or logins are passed over.
    """
    if answer.rc != 0 or "looked" not in answer.lines:
        return unread(answer)
    failed = [line.removeprefix("● ").split()[0] for line in answer.lines if line != "looked"]
    ours = [unit for unit in failed if _OURS.search(unit)]
    if ours:
        fix = f"systemctl status {' '.join(ours)}; journalctl -b -u {ours[0]}"
        return warn(f"{', '.join(ours)} failed", expected="none", fix=fix)
    return ok(f"{len(failed)} failed, none of which matters" if failed else "none failed")


@each_node(
    "svc.oomd",
    "no daemon ends processes before the memory is used up",
    probe="grep -hsxE 'systemd-oomd|earlyoom|nohang' /proc/[0-9]*/comm\necho looked\n",
    why=(
        "Reading data or saving a checkpoint looks like memory pressure: the daemon kills the training, not the kernel."
    ),
)
def oomd(answer: Answer) -> Judgement:
    """WARN with its name.

    ``systemd-oomd`` kills whole control groups, such as a user's session, by memory pressure (systemd-oomd.service(8));
    ``earlyoom`` and ``nohang`` kill the largest process. ``pgrep`` may be absent, so the names are read from /proc.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    found = sorted({*answer.lines} - {"looked"})
    if found:
        fix = f"systemctl disable --now {' '.join(found)}"
        return warn(f"{', '.join(found)} runs", expected="none runs", fix=fix)
    return ok("none runs")
