"""Operating system: the checks."""

import re

from provision.checks.kit import (
    GPUS,
    SHOW,
    SYSTEM,
    Answer,
    Judgement,
    Plan,
    each_node,
    equal,
    fail,
    not_here,
    number,
    ok,
    pairs,
    unknown,
    unread,
    warn,
)
from provision.checks.kit.mounts import shares

_MODULE_PROBE = (
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


@each_node(
    "os.module",
    "the running kernel has a module of the GPU driver",
    probe=_MODULE_PROBE,
    why="After a kernel update without its module the node has no GPU: every rank there fails when CUDA starts.",
)
def module(node: str, answer: Answer) -> Judgement:
    """FAIL where there is none, WARN where it is only in memory.

    modinfo(8) finds it for the running kernel wherever the distribution or DKMS put it. What is loaded may lie nowhere
    any more; it will not come back after the next boot.
    """
    facts = pairs(answer)
    gpus, kernel, loaded = number(facts.get("gpus")), facts.get("kernel", ""), facts.get("loaded")
    if gpus is None:
        return unread(answer)
    if gpus == 0:
        return not_here("no GPU")
    if "disk" in facts:
        return ok(f"{facts['disk']} for {kernel}")
    if "modinfo" in facts:
        return unknown("modinfo is not installed", fix=f"install kmod on {node}")
    if loaded:
        observed = f"{loaded} is loaded, but {kernel} has no module on disk"
        fix = "install the driver's module for this kernel again (dkms autoinstall) before the node is rebooted"
        return warn(observed, expected=f"a module for {kernel}", fix=fix)
    fix = f"dkms autoinstall -k {kernel}, or boot the kernel that the module was built for"
    return fail(f"no nvidia module for {kernel}", expected=f"a module for {kernel}", fix=fix)


_SUDO_PROBE = """\
while read -r key uid rest; do
    [ "$key" != Uid: ] || break
done </proc/self/status
if [ "$uid" = 0 ]; then
    echo root
elif ! command -v sudo >/dev/null 2>&1; then
    echo absent
elif output=$(sudo -n true 2>&1); then
    echo passwordless
else
    echo "refused $output"
fi
"""
_TTY = "must have a tty"


@each_node(
    "os.sudo",
    "the login may become root where services are to be set up",
    probe=_SUDO_PROBE,
    why=(
        "`clusterctl deploy` cannot set up the services that the inventory names; the environment itself needs no root."
    ),
)
def sudo(node: str, answer: Answer, plan: Plan) -> Judgement:
    """FAIL where services are named and root is out of reach.

    ``sudo -n`` never asks (sudo(8)); its messages are those of sudo 1.8 and 1.9 in the locale C. Whether a password
    would be accepted is known only when it is given: clusterctl asks once for all nodes.
    """
    reply = answer.lines[0] if answer.lines else ""
    facts = answer.out.lower()
    if reply == "root":
        return ok("logs in as root")
    if reply == "passwordless":
        return ok("sudo without a password")
    if "password is required" in facts:
        return ok("sudo asks for a password")
    if reply != "absent" and not reply.startswith("refused "):
        return unread(answer)
    if not plan.inventory.services:
        return ok("no sudo, and no service needs it")
    fix = f"as root on {node}: a file in /etc/sudoers.d with the line `USER ALL=(ALL) NOPASSWD: ALL`"
    if reply == "absent":
        fix = f"install sudo on {node}, or log in as root (`user: root`)"
    elif _TTY in facts:
        fix = f"as root on {node}: a file in /etc/sudoers.d with the line `Defaults !requiretty`"
    observed = "sudo is not installed" if reply == "absent" else reply.removeprefix("refused ")[:160]
    return fail(observed, expected="root by sudo or by login", fix=fix)


_FAULTS = {4: "a machine check", 5: "a bad page", 7: "an oops", 14: "a soft lockup"}


@each_node(
    "os.taint",
    "the kernel has met no fault since the node started",
    probe=SYSTEM,
    why="After an oops, a machine check or a lockup the node may hang or corrupt data at any moment.",
)
def taint(answer: Answer) -> Judgement:
    """FAIL with what the kernel met.

    Bits of /proc/sys/kernel/tainted (Documentation/admin-guide/tainted-kernels.rst): 4 a machine check, 5 a bad page, 7
    an oops, 14 a soft lockup. That a driver is proprietary, unsigned or built out of tree (0, 12, 13) is no fault.
    """
    taint = number(pairs(answer).get("taint"))
    if taint is None:
        return unread(answer)
    faults = [what for bit, what in _FAULTS.items() if taint >> bit & 1]
    if faults:
        fix = "read journalctl -k for its cause, and reboot the node"
        return fail(f"{' and '.join(faults)} (taint {taint})", expected="none", fix=fix)
    return ok(f"no fault (taint {taint})" if taint else "no fault")


_TOOLS_PROBE = """\
for program in tar gzip grep sed cat chmod cp cut date dd df dirname du env head id ln ls mkdir mktemp mv od \\
    readlink rm sha256sum sort stat tail touch tr uname wc zstd; do
    command -v "$program" >/dev/null 2>&1 || echo "missing $program"
done
echo looked
"""


@each_node(
    "os.tools",
    "the programs that clusterctl runs on a node are there",
    probe=_TOOLS_PROBE,
    why=(
        "Without them nothing can be unpacked or verified on the node; without zstd a deploy brings the program first."
    ),
)
def tools(answer: Answer) -> Judgement:
    """FAIL for what must be there.

    sh, tar and the coreutils are what its scripts use; zstd is used where it is there.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    missing = [line.removeprefix("missing ") for line in answer.lines if line.startswith("missing ")]
    needed = [program for program in missing if program != "zstd"]
    if needed:
        fix = "install tar, gzip, grep, sed and coreutils"
        return fail(f"no {', '.join(needed)}", expected="all of them", fix=fix)
    return ok("all, but for zstd: a deploy brings it" if missing else "all, and zstd")


_UPDATES_PROBE = """\
systemctl list-unit-files --no-legend --no-pager apt-daily-upgrade.timer dnf-automatic.timer \\
    dnf-automatic-install.timer yum-cron.service 2>/dev/null
if command -v unattended-upgrade >/dev/null 2>&1; then
    echo "periodic $(apt-config dump --format '%v%n' APT::Periodic::Unattended-Upgrade 2>/dev/null)"
fi
echo looked
"""
_RPM = ("dnf-automatic.timer", "dnf-automatic-install.timer", "yum-cron.service")
_APT = "apt-daily-upgrade.timer"


@each_node(
    "os.updates",
    "no automatic package upgrades",
    probe=_UPDATES_PROBE,
    tool="systemctl",
    why="A driver that is upgraded under a job breaks NVML and every new process: 'Driver/library version mismatch'.",
)
def updates(answer: Answer) -> Judgement:
    """WARN where such an upgrader is enabled, installed and switched on.

    On Debian and Ubuntu the timer ``apt-daily-upgrade.timer`` starts ``unattended-upgrade``, which acts where
    ``APT::Periodic::Unattended-Upgrade`` is set (apt.systemd.daily); on the rpm family a timer of ``dnf-automatic`` or
    ``yum-cron`` does. Whether they are enabled is read from the unit files.
    """
    facts = pairs(answer)
    if "looked" not in facts:
        return unread(answer)
    active = [unit for unit in _RPM if facts.get(unit, "").startswith("enabled")]
    if facts.get(_APT, "").startswith("enabled") and facts.get("periodic", "") not in {"", "0"}:
        active.append(_APT)
    if active:
        fix = f"systemctl disable --now {' '.join(active)}; hold the driver: apt-mark hold 'nvidia-*' 'libnvidia-*'"
        return warn(f"{', '.join(active)} upgrades packages", expected="no upgrades unasked", fix=fix)
    return ok("no upgrades unasked")


_SELINUX_MODES = {"1": "enforcing", "0": "permissive", "off": "off"}


def _natural(release: str) -> tuple[tuple[int, str], ...]:
    """``6.1.0-9`` before ``6.1.0-26``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[a-z]+", release))


@each_node(
    "os.reboot",
    "no other kernel waits for the next boot",
    probe=SYSTEM,
    why=(
        "A node that restarts during a run comes back with another kernel, perhaps without its GPU and InfiniBand "
        "drivers."
    ),
)
def reboot(answer: Answer) -> Judgement:
    """WARN where a newer kernel is installed than runs, or a package asks for a reboot.

    The newest ``/boot/vmlinuz-RELEASE`` is what boot loaders start by default; packages of Debian and Ubuntu that want
    a reboot touch ``/run/reboot-required``.
    """
    facts = pairs(answer)
    running = facts.get("kernel")
    if not running:
        return unread(answer)
    installed = [line.removeprefix("installed ") for line in answer.lines if line.startswith("installed ")]
    newest = max(installed, key=_natural, default=running)
    fix = "reboot it between two runs, and check again"
    if _natural(newest) > _natural(running):
        return warn(f"{running} runs, {newest} is installed", expected="the running one is the newest", fix=fix)
    if "reboot" in facts:
        return warn("an upgraded package asks for a reboot", expected="none asks", fix=fix)
    return ok(running)


_LOGOUT_PROBE = """\
while read -r key uid rest; do
    [ "$key" != Uid: ] || break
done </proc/self/status
echo "uid $uid"
for file in /usr/lib/systemd/logind.conf /etc/systemd/logind.conf \\
    /usr/lib/systemd/logind.conf.d/*.conf /run/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf.d/*.conf; do
    [ -r "$file" ] || continue
    echo "file $file"
    while read -r line; do
        case $line in KillUserProcesses*) echo "$line" ;; esac
    done <"$file"
done
echo looked
"""
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})  # systemd.syntax(7)


def _logind_values(answer: Answer) -> list[tuple[str, str]]:
    """Every setting with its file, in the order in which logind reads them."""
    found: dict[str, tuple[str, str]] = {}
    place = ""
    for line in answer.lines:
        if line.startswith("file "):
            place = line.removeprefix("file ")
        elif "=" in line:
            # A drop-in hides one of the same name in a place read before it; the main file comes before all drop-ins.
            found[place.rpartition("/")[2] if ".conf.d/" in place else ""] = (place, line.partition("=")[2].strip())
    return [found[key] for key in sorted(found)]


@each_node(
    "os.logout",
    "processes of a user survive logout",
    probe=_LOGOUT_PROBE,
    why="A training started by hand in tmux or with nohup dies when its owner's last connection ends.",
)
def logout(answer: Answer) -> Judgement:
    """WARN where logind kills a login's processes.

    ``KillUserProcesses`` in logind.conf(5) and its drop-ins, of which the last file by name wins, one in /etc before
    one of the same name in /run and in /usr/lib. Debian, Ubuntu and the Red Hat family are built with no as its
    default. ``KillExcludeUsers`` spares root.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    values = _logind_values(answer)
    where, value = values[-1] if values else ("", "no")
    if value.lower() not in _YES:
        return ok("logind kills nothing" if any(line.startswith("file ") for line in answer.lines) else "no logind")
    if "uid 0" in answer.lines:
        return ok("logind kills users' processes, but none of root")
    fix = f"KillUserProcesses=no in {where}, then systemctl restart systemd-logind between two runs"
    return warn(f"KillUserProcesses={value} in {where}", expected="KillUserProcesses=no", fix=fix)


CHECKS = (
    equal(
        "os.gid",
        "the training user's main group has the same number on every node",
        probe=SYSTEM,
        read=lambda answer: number(pairs(answer).get("Gid")),
        noun="gid",
        fix="groupmod -g GID GROUP as root when nothing of the user runs, then chgrp the home",
        why="Files in a shared folder that only the group may read cannot be read on the odd node.",
        about="""
        NFS with ``sec=sys`` sends the numbers of the group and of at most 16 further ones (RFC 5531, appendix A).
        """,
    ),
    equal(
        "os.kernel",
        "every node runs the same kernel",
        probe=SYSTEM,
        read=lambda answer: pairs(answer).get("kernel"),
        fix=(
            "install and boot the usual kernel, and hold it: apt-mark hold 'linux-image-*' (dnf versionlock add kernel)"
        ),
        why=(
            "Drivers, NFS and RDMA behave differently from kernel to kernel: faults appear on one node and "
            "are hard to find."
        ),
        about="""
        ``uname -r``, the release that modules are built for.
        """,
    ),
    equal(
        "os.release",
        "every node has the same release of its distribution",
        probe=SYSTEM,
        read=lambda answer: pairs(answer).get("release"),
        fix="install the usual release on the odd node, or leave it out (--exclude)",
        why="Another release has another glibc and other packages: what works on the other nodes fails on the odd one.",
        about="""
        ``ID`` and ``VERSION_ID`` of os-release(5).
        """,
    ),
    equal(
        "os.selinux",
        "SELinux is in the same mode on every node",
        probe=SYSTEM,
        read=lambda answer: _SELINUX_MODES.get(pairs(answer).get("selinux", "")),
        fix="set SELINUX= alike in /etc/selinux/config and reboot; for now setenforce 0 (or 1)",
        why=(
            "What is allowed on the others is refused on the node that enforces: 'Permission denied' with "
            "right file modes."
        ),
        about="""
        ``/sys/fs/selinux/enforce``, which getenforce(8) reads, holds 1 (enforcing) or 0 (permissive), and is absent
        where SELinux is off. No mode is wrong in itself.
        """,
    ),
    equal(
        "os.uid",
        "the training user has the same number on every node",
        probe=SYSTEM,
        read=lambda answer: number(pairs(answer).get("Uid")),
        noun="uid",
        verdict=lambda plan: "FAIL" if shares(plan) else "WARN",
        fix="usermod -u UID USER as root when nothing of the user runs, then chown the home",
        why="What one node writes to a shared folder another cannot read: checkpoints fail with 'Permission denied'.",
        about="""
        NFS with ``sec=sys`` knows users by number only (nfs(5)); names do not travel.
        """,
    ),
)
