"""The ephemeral key with which a node logs in to the next one; it can only start ``receive`` there. Pure.

The nodes that pass bytes on keep the private key in memory for the second of their login. The public key is a line in
``authorized_keys`` of the receiving nodes; it is removed at the end, or by the next transfer after a kill. Its comment
names its owner: ``clusterctl-relay:CLUSTER:SCOPE:CREATED:ID``. A *scope* is the parent of a transfer's folder, which a
command's lock protects. So a command removes the keys of its own scope only, and of others only if they are days old.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.render import render, words
from provision.ssh.openssh import CIPHERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.model import Inventory

_OPTIONS = {  # sshd(8), AUTHORIZED_KEYS FILE FORMAT
    "restrict": (7, 2),
    "expiry-time": (7, 7),
}
_RESTRICT_BEFORE = "no-port-forwarding,no-X11-forwarding,no-agent-forwarding,no-pty,no-user-rc"
# Characters that no quoting protects in every login shell: '!' in csh, the backslash in fish.
_UNQUOTABLE = re.compile(r"['\"\\!\x00-\x1f]")
PATIENCE = 100  # tenths of a second after which another writer to a shared home counts as dead
LIFE = 24 * 3600  # seconds until sshd refuses a key; after twice that, any command may remove it
CONNECT = 8  # seconds until a login from one node to another counts as failed
_PERSIST = 120  # seconds until ssh closes an idle connection
_SOCKET = 80  # length of a folder in which ssh can create a socket: 108, less the name and a random prefix
ALIVE = 5  # seconds between keepalives to the next node; the third without an answer ends the connection


def scope_of(folder: str) -> str:
    """The scope of a transfer with this folder."""
    return str(PurePosixPath(folder).parent)


def comment_prefix(inventory: Inventory, scope: str = "") -> str:
    """The start of the comments of the cluster's lines in ``authorized_keys``, or of one scope's lines."""
    return f"clusterctl-relay:{_hash(str(inventory.root))}:" + (f"{_hash(scope)}:" if scope else "")


def secret_prefix(inventory: Inventory, scope: str) -> str:
    """The start of the names of folders with private keys."""
    return f"clusterctl-relay-{_hash(f'{inventory.root}:{scope}')}-"


def leftover_values(inventory: Inventory, scope: str) -> Mapping[str, object]:
    """Values for the scripts that look for leftovers of relays."""
    return {
        "tag": comment_prefix(inventory, scope),
        "secrets": secret_prefix(inventory, scope),
        "place": scope,
        "now": int(time.time()),
        "life": LIFE,
    }


def forget(inventory: Inventory, scope: str, folder: str = "") -> str:
    """The script that removes the keys of a scope's relays from a node, also those of earlier transfers.

    With a transfer's folder, it also kills the processes that still run there.
    """
    values = {"line": "", "options": "", "patience": PATIENCE}
    return render("transfer/forget.sh.j2", folder=folder, **values, **leftover_values(inventory, scope))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def is_quotable(folder: str) -> bool:
    """Whether a forced command can name a file in this folder in every login shell."""
    return not _UNQUOTABLE.search(folder)


@dataclass(frozen=True)
class RelayKey:
    """One transfer's key pair."""

    private: str
    public: str
    created: int
    number: str

    @classmethod
    def new(cls) -> RelayKey:
        """A new key for one transfer."""
        # Imported when needed, so that --help starts faster.
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return cls(private.decode("ascii"), public.decode("ascii"), int(time.time()), secrets.token_hex(6))

    def line(self, inventory: Inventory, scope: str) -> str:
        """The line for ``authorized_keys``, without its options."""
        return f"{self.public} {comment_prefix(inventory, scope)}{self.created}:{self.number}"

    def secret(self, inventory: Inventory, scope: str) -> str:
        """The name of the folder with the private key."""
        return secret_prefix(inventory, scope) + self.number


@dataclass(frozen=True)
class LoginTarget:
    """How other nodes log in to a node, from its survey."""

    alias: str  # the name of its host key
    user: str
    port: int
    addresses: tuple[str, ...]  # the first that answers is used
    host_key: tuple[str, bytes] = field(default=("", b""))  # its type and its wire form

    @property
    def known(self) -> str:
        """Its line in ``known_hosts``."""
        kind, blob = self.host_key
        return f"{self.alias} {kind} {base64.b64encode(blob).decode('ascii')}\n"

    def commands(self, secret: str) -> list[Mapping[str, object]]:
        """For every address, the ssh command that logs in, and the text with the command of ``receive``.

        Args:
            secret: the folder of the private key, and of the socket of the connection that both commands share.
        """
        found: list[Mapping[str, object]] = []
        for address in self.addresses:
            share = {"ControlMaster": "auto", "ControlPersist": str(_PERSIST)} if len(secret) <= _SOCKET else {}
            own = words([*self._argv(secret, address, {}), "receive"])
            text = f"secret={words([secret])}\nset -- {own}"
            found.append({"argv": self._argv(secret, address, share), "text": text})
        return found

    def _argv(self, secret: str, address: str, share: Mapping[str, str]) -> list[str]:
        inside = secret.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
        options = {
            "IdentitiesOnly": "yes",
            "BatchMode": "yes",
            "PreferredAuthentications": "publickey",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": f'"{inside}/known_hosts"',
            "GlobalKnownHostsFile": "/dev/null",
            "HostKeyAlias": self.alias,
            "ConnectTimeout": str(CONNECT),
            "ServerAliveInterval": str(ALIVE),
            "ServerAliveCountMax": "3",
            "Compression": "no",
            "Ciphers": CIPHERS,
            "ControlMaster": "no",
            "ControlPath": f'"{inside}/hop"' if len(secret) <= _SOCKET else "none",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "LogLevel": "ERROR",
            **share,
        }
        # Not `-F none`, which OpenSSH 6 reads as a file name.
        argv = ["ssh", "-F", "/dev/null", "-T", "-e", "none", "-i", f"{secret}/key"]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        return [*argv, "-l", self.user, "-p", str(self.port), "--", address]


def options(folder: str, version: tuple[int, int] | None) -> tuple[str, bool]:
    """The options before the key in ``authorized_keys``, and whether an expiry time may be added.

    Args:
        folder: the transfer's folder on the receiving node; ``is_quotable``.
        version: its OpenSSH version; with None, only options that every version has.
    """
    restrict = "restrict" if version and version >= _OPTIONS["restrict"] else _RESTRICT_BEFORE
    expires = bool(version and version >= _OPTIONS["expiry-time"])
    return f"{restrict},command=\"exec sh '{folder}/receive'\"", expires
