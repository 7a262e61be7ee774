"""What lets one node hand bytes to the next: an ephemeral key that can only start ``receive`` there. Pure.

The private half lies on the nodes that pass bytes on, in memory, for the second in which they log in. The public half
is a line in the ``authorized_keys`` of the nodes that are passed to, which is removed at the end, and by the next run
after a kill. Its comment says whose it is: ``clusterctl-relay:TAG:EPOCH:ID``.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
# What no quoting carries through every login shell: csh has its own '!', fish its own backslash.
_UNSPEAKABLE = re.compile(r"['\"\\!\x00-\x1f]")
PATIENCE = 100  # tenths of a second for another node that writes to a shared home
CONNECT = 8  # seconds until a way between two nodes counts as shut
_PERSIST = 120  # seconds that a connection which nothing uses stays open
_SOCKET = 80  # letters of a folder in which ssh can make a socket: 108, less the name and a random one before it
ALIVE = 5  # seconds between two questions whether the next node is there; the third without an answer ends it


def tag(inventory: Inventory) -> str:
    """What all relays of a cluster have in common: 12 hex digits for the inventory's root."""
    return hashlib.sha256(str(inventory.root).encode("utf-8", "surrogateescape")).hexdigest()[:12]


def comment(inventory: Inventory) -> str:
    """How the comment of each of the cluster's lines in ``authorized_keys`` begins."""
    return f"clusterctl-relay:{tag(inventory)}:"


def secret_names(inventory: Inventory) -> str:
    """How the names of the folders begin that hold private keys."""
    return f"clusterctl-relay-{tag(inventory)}-"


def forget(inventory: Inventory, folder: str = "") -> str:
    """The script that takes back what the cluster's relays have left on a node, in this run or another.

    With a transfer's folder also the processes that still run in it.
    """
    values = {"tag": comment(inventory), "secrets": secret_names(inventory), "line": "", "options": ""}
    return render("transfer/forget.sh.j2", folder=folder, patience=PATIENCE, **values)


def speakable(folder: str) -> bool:
    """Whether a forced command can name a file in this folder, whatever the login shell is."""
    return not _UNSPEAKABLE.search(folder)


@dataclass(frozen=True)
class RelayKey:
    """One transfer's key pair."""

    private: str
    line: str  # of authorized_keys, without its options
    name: str  # of the folder that holds the private key

    @classmethod
    def new(cls, inventory: Inventory) -> RelayKey:
        """A new key for one transfer."""
        key, number = Ed25519PrivateKey.generate(), secrets.token_hex(6)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        line = f"{public.decode('ascii')} {comment(inventory)}{int(time.time())}:{number}"
        return cls(private.decode("ascii"), line, secret_names(inventory) + number)


@dataclass(frozen=True)
class Door:
    """How a node is reached by another one, as it was seen when it was surveyed."""

    alias: str  # under which its host key is known
    user: str
    port: int
    addresses: tuple[str, ...]  # the first that answers is taken
    host_key: tuple[str, bytes] = field(default=("", b""))  # its type and its wire form

    @property
    def known(self) -> str:
        """Its line in ``known_hosts``."""
        kind, blob = self.host_key
        return f"{self.alias} {kind} {base64.b64encode(blob).decode('ascii')}\n"

    def ways(self, secret: str) -> list[Mapping[str, object]]:
        """For every address the ssh command that logs in, and the text that ``receive`` reads its own from.

        Args:
            secret: the folder of the private key, which also holds the socket of the connection that they share.
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
        # Not `-F none`, which OpenSSH 6 takes for a file.
        argv = ["ssh", "-F", "/dev/null", "-T", "-e", "none", "-i", f"{secret}/key"]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        return [*argv, "-l", self.user, "-p", str(self.port), "--", address]


def options(folder: str, version: tuple[int, int] | None) -> tuple[str, bool]:
    """The options before the key in ``authorized_keys``, and whether an expiry time may be added.

    Args:
        folder: of the node that is passed to; ``speakable``.
        version: of its OpenSSH, None where it is not known: then only what every version knows.
    """
    restrict = "restrict" if version and version >= _OPTIONS["restrict"] else _RESTRICT_BEFORE
    expires = bool(version and version >= _OPTIONS["expiry-time"])
    return f"{restrict},command=\"exec sh '{folder}/receive'\"", expires
