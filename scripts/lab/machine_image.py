"""The disk that emulated machines boot from: a small Debian with systemd, its own kernel, kernel NFS and sshd.

    CACHE/machine/<digest>/disk        an ext4 file system, never written to: each machine has a copy of it
    CACHE/machine/<digest>/kernel      boots it without an initrd: Debian's cloud kernel has ext4 and NVMe built in
    CACHE/machine/<digest>/id          the key that logs in as root and as USER
    CACHE/machine/<digest>/host.pub    the machines' host key

Debian's packages come from the sandbox's cache of roots. The folder appears under its name only when it is complete.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import lab_recipe
from lab_run import Log

from provision.sandbox import rootfs

USER = "train"
USER_ID = 2000
SIZE = "3G"  # sparse: it uses about 400 MB
# No chrony: the tests install it from a bundle. Debian has systemd-timesyncd.
PACKAGES = (
    "systemd-sysv", "udev", "kmod", "iproute2", "procps", "sudo", "systemd-timesyncd",
    "nfs-kernel-server", "nfs-common", "linux-image-cloud-amd64",
)  # fmt: skip
# Units that take seconds in an emulated machine and are not needed; a masked unit never starts.
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "getty.target", "nfs-blkmap.service", "systemd-pstore.service", "systemd-binfmt.service",
    "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service", "dev-hugepages.mount", "dev-mqueue.mount",
    "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount", "sys-fs-fuse-connections.mount",
    "modprobe@configfs.service", "modprobe@dm_mod.service", "modprobe@drm.service", "modprobe@efi_pstore.service",
    "modprobe@fuse.service", "modprobe@loop.service", "systemd-network-generator.service",
    "kmod-static-nodes.service", "systemd-random-seed.service", "systemd-sysusers.service",
    "systemd-journal-flush.service", "systemd-journald-audit.socket", "proc-sys-fs-binfmt_misc.automount",
    "systemd-ask-password-console.path", "systemd-ask-password-wall.path",
)  # fmt: skip
# Programs that systemd starts at each boot and daemon-reload, several of them for each change of a service, and that
# find nothing to do here. Those of fstab and NFS stay.
GENERATORS = (
    "systemd-cryptsetup-generator", "systemd-debug-generator", "systemd-getty-generator", "systemd-gpt-auto-generator",
    "systemd-hibernate-resume-generator", "systemd-integritysetup-generator", "systemd-rc-local-generator",
    "systemd-run-generator", "systemd-system-update-generator", "systemd-sysv-generator",
    "systemd-veritysetup-generator",
)  # fmt: skip

# A machine's name is on its kernel's command line, since all machines share one disk: lab.name= and lab.address=.
_IDENTITY = """\
#!/bin/sh
set -eu
for word in $(cat /proc/cmdline); do
    case $word in
        lab.name=*) name=${word#*=} ;;
        lab.address=*) address=${word#*=} ;;
    esac
done
if [ "$(cat /etc/hostname)" != "$name" ]; then
    echo "$name" >/etc/hostname
    printf '127.0.0.1\\tlocalhost\\n127.0.1.1\\t%s\\n' "$name" >/etc/hosts
    hostname "$name"
fi
ip address add "$address" dev eth0
ip link set eth0 up
"""
_IDENTITY_UNIT = """\
[Unit]
Description=Name and address from the kernel's command line
DefaultDependencies=no
BindsTo=sys-subsystem-net-devices-eth0.device
After=systemd-remount-fs.service sys-subsystem-net-devices-eth0.device
Wants=network.target network-online.target
Before=network.target network-online.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/lab-identity
[Install]
WantedBy=multi-user.target
"""
# The program that started the machine reads the second serial line: a line when users can log in, and one when every
# unit of the boot has started or failed.
_READY = """\
#!/bin/sh
echo "reached $(cat /proc/sys/kernel/random/boot_id)" >/dev/ttyS1
state=$(systemctl is-system-running --wait)
failed=$(systemctl list-units --failed --plain --no-legend --no-pager | cut -d' ' -f1 | tr '\\n' ' ')
echo "up $(cat /proc/sys/kernel/random/boot_id) $state $failed" >/dev/ttyS1
"""
_READY_UNIT = """\
[Unit]
Description=Reports to the host that this machine is up
After=multi-user.target
[Service]
ExecStart=/usr/local/sbin/lab-ready
[Install]
WantedBy=multi-user.target
"""
_FSTAB = """\
# <file system> <mount point> <type> <options> <dump> <pass>
/dev/nvme0n1\t/\text4\terrors=remount-ro\t0\t0
"""
# A hundred terminals need no rules of udev's.
_TRIGGER = """\
[Service]
ExecStart=
ExecStart=udevadm trigger --action=add --subsystem-match=pci --subsystem-match=virtio --subsystem-match=net \\
    --subsystem-match=block --subsystem-match=misc
"""
FILES = {
    "usr/local/sbin/lab-identity": (0o755, _IDENTITY),
    "usr/local/sbin/lab-ready": (0o755, _READY),
    "etc/systemd/system/lab-identity.service": (0o644, _IDENTITY_UNIT),
    "etc/systemd/system/lab-ready.service": (0o644, _READY_UNIT),
    "etc/systemd/system/systemd-udev-trigger.service.d/lab.conf": (0o644, _TRIGGER),
    "etc/fstab": (0o644, _FSTAB),
    "etc/resolv.conf": (0o644, "# no name server: nothing is reachable from here\n"),
    "etc/machine-id": (0o444, ""),  # empty: made by the first boot, which is no "first boot" with presets then
    f"etc/sudoers.d/{USER}": (0o440, f"{USER} ALL=(ALL) NOPASSWD: ALL\n"),
    "etc/ssh/sshd_config.d/lab.conf": (0o644, "HostKey /etc/ssh/ssh_host_ed25519_key\n"),
    # Units that take long on a busy host are slow, not broken.
    "etc/systemd/system.conf.d/lab.conf": (0o644, "[Manager]\nDefaultTimeoutStartSec=600s\n"),
    "etc/systemd/journald.conf.d/lab.conf": (0o644, "[Journal]\nStorage=volatile\nAudit=no\n"),
}


@dataclass(frozen=True)
class Image:
    """The files of a complete image."""

    disk: Path
    kernel: Path
    key: Path
    host_key: str  # "ssh-ed25519 AAAA…"


def image(cache: Path | None = None) -> Image:
    """The machines' image, built when it is not in the cache.

    Raises:
        LabError: it cannot be built.
    """
    wanted = rootfs.recipe(PACKAGES)
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    text = json.dumps([asdict(wanted), source], sort_keys=True)
    folder = (cache or lab_recipe.default_cache()).absolute() / "machine"
    folder.mkdir(parents=True, exist_ok=True)
    home = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
    with (folder / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build of the same is waited for
        if not home.exists():
            for leftover in folder.glob(f".{home.name}-*"):  # its maker was killed, else it would hold the lock
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=folder) as work:
                _build(wanted, Path(work))
                (Path(work) / "home").rename(home)
    return Image(home / "disk", home / "kernel", home / "id", (home / "host.pub").read_text().strip())


def _build(wanted: rootfs.Recipe, work: Path) -> None:
    log = Log()
    root, home = work / "root", work / "home"
    home.mkdir()
    with log.step("packages of the emulated machines"):
        os.environ["INITRD"] = "No"  # Debian's kernel packages then make no initrd, which is not needed
        try:
            packages = rootfs.minimal(wanted)
        finally:
            del os.environ["INITRD"]
    with log.step("disk of the emulated machines"):
        log.run(["cp", "-a", "--reflink=auto", packages, root])
        (home / "kernel").write_bytes(next((root / "boot").glob("vmlinuz-*")).read_bytes())
        _adapt(root, home, log)
        log.run(["mke2fs", "-q", "-t", "ext4", "-d", root, home / "disk", SIZE])


def _adapt(root: Path, home: Path, log: Log) -> None:
    for path, (mode, text) in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(mode)
    chroot = ["chroot", root]
    log.run([*chroot, "useradd", "--create-home", "--uid", str(USER_ID), "--shell", "/bin/bash", USER])
    log.run([*chroot, "systemctl", "mask", *MASKED])
    (root / "etc/systemd/system-generators").mkdir()
    for name in GENERATORS:
        (root / "etc/systemd/system-generators" / name).symlink_to("/dev/null")
    log.run([*chroot, "systemctl", "enable", "lab-identity.service", "lab-ready.service"])
    host_key = root / "etc/ssh/ssh_host_ed25519_key"
    for key in (home / "id", host_key):
        log.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key])
    (home / "host.pub").write_text(host_key.with_suffix(".pub").read_text())
    for user, folder in (("root", root / "root"), (USER, root / "home" / USER)):
        (folder / ".ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(home / "id.pub", folder / ".ssh/authorized_keys")
        log.run([*chroot, "chown", "-R", f"{user}:", f"/{folder.relative_to(root)}/.ssh"])
