"""A node's own disk: the upper layer of its overlay, filled before the node starts."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from provision.render import render
from provision.sandbox.accounts import Accounts, with_trainer
from provision.sandbox.process import run
from provision.sandbox.state import NodeState

_SCRATCH = ("/tmp", "/var/tmp")  # noqa: S108 - paths inside a node


@dataclass(frozen=True)
class Common:
    """What the disks of all nodes of a sandbox have in common.

    Attributes:
        lower: the shared root below.
        public_key: may log in as root and trainer.
        password: that of root and trainer; None for key logins only.
        accounts: ``/etc/passwd`` and its companions.
        hide: absolute paths of ``lower`` that a node must see empty.
    """

    lower: Path
    public_key: str
    password: str | None
    accounts: Accounts
    hide: tuple[str, ...]


def common(lower: Path, public_key: str, password: str | None, private: Sequence[Path]) -> Common:
    """Reads what is needed of ``lower``, once for all nodes.

    Args:
        lower: the shared root below.
        public_key: may log in as root and trainer.
        password: that of root and trainer; None for key logins only.
        private: folders of this machine that hold the disks and keys of nodes.
    """
    passwd, group, shadow = ((lower / "etc" / name).read_text("utf-8") for name in ("passwd", "group", "shadow"))
    # On stdin: argv can be read by everybody on the machine.
    hashed = run("openssl", "passwd", "-6", "-stdin", stdin=password + "\n").strip() if password else None
    accounts = with_trainer(Accounts(passwd, group, shadow), hashed)
    hide = [*_SCRATCH, "/root/.ssh", f"{accounts.trainer_home}/.ssh"]
    if lower == Path("/"):
        hide += [str(each) for each in private if not any(other in each.parents for other in private)]
    return Common(lower, public_key, password, accounts, tuple(hide))


def fill(folder: Path, node: NodeState, shared: Common) -> str:
    """Makes ``upper``, ``work`` and ``root`` of a node below ``folder``.

    Returns:
        The node's public host key, ``ssh-ed25519 AAAA…``.
    """
    for name, mode in (("upper", 0o755), ("work", 0o700), ("root", 0o755)):
        (folder / name).mkdir(mode=mode)
        (folder / name).chmod(mode)  # whatever the umask is
    disk = _Disk(folder / "upper", shared.lower)
    for path in shared.hide:
        disk.empty(path)
    for path in _SCRATCH:
        disk.own(path, 0o1777, 0)
    disk.write("/etc/hostname", node.name + "\n")
    disk.write("/etc/hosts", render("sandbox/hosts.j2", name=node.name, address=node.address))
    disk.write("/etc/resolv.conf", "# No name server: the sandbox reaches no other network.\n")
    disk.write("/etc/machine-id", secrets.token_hex(16) + "\n", 0o444)
    disk.write("/etc/passwd", shared.accounts.passwd)
    disk.write("/etc/group", shared.accounts.group)
    disk.write("/etc/shadow", shared.accounts.shadow, 0o600)
    disk.write("/etc/ssh/sshd_config", render("sandbox/sshd_config.j2", password=bool(shared.password)))
    trainer = shared.accounts.trainer_id
    disk.own(shared.accounts.trainer_home, 0o755, trainer)
    for home, owner in (("/root", 0), (shared.accounts.trainer_home, trainer)):
        disk.own(f"{home}/.ssh", 0o700, owner)
        disk.write(f"{home}/.ssh/authorized_keys", shared.public_key + "\n", 0o600, owner)
    host_key = folder / "upper/etc/ssh/ssh_host_ed25519_key"
    make_key(host_key, f"root@{node.name}")
    return " ".join(host_key.with_suffix(".pub").read_text(encoding="ascii").split()[:2])


def make_key(path: Path, comment: str) -> None:
    """Writes an ed25519 key pair without a passphrase: ``path`` and ``path.pub``."""
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


class _Disk:
    """Writes into an upper layer so that, merged with the lower one, nothing else changes its look."""

    def __init__(self, upper: Path, lower: Path) -> None:
        self._upper = upper
        self._lower = lower

    def folder(self, path: str) -> Path:
        """Makes ``path`` and its parents, each with the mode and owner that it has in the lower layer."""
        here, below = self._upper, self._lower
        for part in Path(path).parts[1:]:
            here, below = here / part, below / part
            if not here.is_dir():
                here.mkdir()
                here.chmod(0o755)
                if below.is_dir():  # an upper folder's mode and owner hide those of the lower one
                    shutil.copystat(below, here)
                    os.chown(here, below.stat().st_uid, below.stat().st_gid)
        return here

    def own(self, path: str, mode: int, owner: int) -> None:
        """Makes ``path`` a folder with this mode and owner."""
        here = self.folder(path)
        here.chmod(mode)
        os.chown(here, owner, owner)

    def empty(self, path: str) -> None:
        """Makes ``path`` an empty folder, whatever the lower layer has there."""
        os.setxattr(self.folder(path), "trusted.overlay.opaque", b"y")

    def write(self, path: str, text: str, mode: int = 0o644, owner: int = 0) -> None:
        """Makes ``path`` a file; a file or link of the lower layer is hidden by it."""
        target = self.folder(str(Path(path).parent)) / Path(path).name
        target.write_text(text, encoding="utf-8")
        target.chmod(mode)
        os.chown(target, owner, owner)
