"""A node's disk: the upper layer of its overlay, filled before the node starts."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from provision.render import render
from provision.sandbox.host import run
from provision.sandbox.state import NodeState

_SCRATCH = ("/tmp", "/var/tmp")  # noqa: S108 - paths inside a node


@dataclass(frozen=True)
class Common:
    """Data that the disks of all nodes of a sandbox share.

    Attributes:
        lower: the shared root, the lower layer.
        public_key: the key that may log in as root and trainer.
        password: the password of root and trainer; None for key logins only.
        accounts: the accounts of every node.
        hide: absolute paths of ``lower`` that must be empty on a node.
    """

    lower: Path
    public_key: str
    password: str | None
    accounts: Accounts
    hide: tuple[str, ...]


def common(lower: Path, public_key: str, password: str | None, private: Sequence[Path]) -> Common:
    """Reads the shared data from ``lower``, once for all nodes.

    Args:
        lower: the shared root, the lower layer.
        public_key: the key that may log in as root and trainer.
        password: the password of root and trainer; None for key logins only.
        private: folders of this machine with the disks and keys of nodes.
    """
    passwd, group, shadow = ((lower / "etc" / name).read_text("utf-8") for name in ("passwd", "group", "shadow"))
    # On stdin, because every user of the machine can read argv.
    hashed = run("openssl", "passwd", "-6", "-stdin", stdin=password + "\n").strip() if password else None
    accounts = with_trainer(Accounts(passwd, group, shadow), hashed)
    hide = [*_SCRATCH, "/root/.ssh", f"{accounts.trainer_home}/.ssh"]
    if lower == Path("/"):
        hide += [str(each) for each in private if not any(other in each.parents for other in private)]
    return Common(lower, public_key, password, accounts, tuple(hide))


def fill(folder: Path, node: NodeState, shared: Common) -> str:
    """Creates ``upper``, ``work`` and ``root`` of a node below ``folder``.

    Returns:
        The node's public host key, ``ssh-ed25519 AAAA…``.
    """
    for name, mode in (("upper", 0o755), ("work", 0o700), ("root", 0o755)):
        (folder / name).mkdir(mode=mode)
        (folder / name).chmod(mode)  # regardless of the umask
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
    """Writes into an upper layer without changing other files of the merged view."""

    def __init__(self, upper: Path, lower: Path) -> None:
        self._upper = upper
        self._lower = lower

    def folder(self, path: str) -> Path:
        """Creates ``path`` and its parents with the modes and owners of the lower layer."""
        here, below = self._upper, self._lower
        for part in Path(path).parts[1:]:
            here, below = here / part, below / part
            if not here.is_dir():
                here.mkdir()
                here.chmod(0o755)
                if below.is_dir():  # the mode and owner of the upper folder hide those of the lower one
                    shutil.copystat(below, here)
                    os.chown(here, below.stat().st_uid, below.stat().st_gid)
        return here

    def own(self, path: str, mode: int, owner: int) -> None:
        """Makes ``path`` a folder with this mode and owner."""
        here = self.folder(path)
        here.chmod(mode)
        os.chown(here, owner, owner)

    def empty(self, path: str) -> None:
        """Makes ``path`` an empty folder, hiding the lower layer's files."""
        os.setxattr(self.folder(path), "trusted.overlay.opaque", b"y")

    def write(self, path: str, text: str, mode: int = 0o644, owner: int = 0) -> None:
        """Writes the file ``path``, which hides a file or link of the lower layer."""
        target = self.folder(str(Path(path).parent)) / Path(path).name
        target.write_text(text, encoding="utf-8")
        target.chmod(mode)
        os.chown(target, owner, owner)


TRAINER = "trainer"
_TRAINER_ID = 1000
_LAST_ID = 60000  # UID_MAX of login.defs(5)
# No password matches "*". Unlike "!" it does not lock the account: sshd without PAM refuses locked ones even by key.
_NO_PASSWORD = "*"  # noqa: S105 - it is the opposite


@dataclass(frozen=True)
class Accounts:
    """The texts of ``/etc/passwd``, ``/etc/group`` and ``/etc/shadow``, and the id and home of ``trainer``."""

    passwd: str
    group: str
    shadow: str
    trainer_id: int = _TRAINER_ID
    trainer_home: str = f"/home/{TRAINER}"


def with_trainer(before: Accounts, password_hash: str | None) -> Accounts:
    """Adds ``trainer`` (uid and gid 1000, or the next free number) and sets the password of root and trainer.

    Args:
        before: the accounts of the node's root file system.
        password_hash: a crypt(5) hash; None for key logins only.
    """
    users = _entries(before.passwd, TRAINER)
    groups = _entries(before.group, TRAINER)
    used = {entry[2] for entry in (*users, *groups)}
    number = next(n for n in range(_TRAINER_ID, _LAST_ID) if str(n) not in used)
    users.append([TRAINER, "x", str(number), str(number), "", before.trainer_home, "/bin/bash"])
    groups.append([TRAINER, "x", str(number), ""])
    secret = password_hash or _NO_PASSWORD
    shadow = [
        [entry[0], secret, *entry[2:]] if entry[0] == "root" else entry for entry in _entries(before.shadow, TRAINER)
    ]
    shadow.append([TRAINER, secret, "20000", "0", "99999", "7", "", "", ""])
    return Accounts(_text(users), _text(groups), _text(shadow), number, before.trainer_home)


def _entries(text: str, without: str) -> list[list[str]]:
    return [line.split(":") for line in text.splitlines() if line and line.partition(":")[0] != without]


def _text(entries: list[list[str]]) -> str:
    return "".join(":".join(entry) + "\n" for entry in entries)
