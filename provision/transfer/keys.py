"""What lets one node hand bytes to the next: an ephemeral key that can only start ``receive`` there. Pure.

The private half lies on the nodes that pass bytes on, in memory, for the second in which they log in. The public half
is a line in the ``authorized_keys`` of the nodes that are passed to, which is removed at the end, and by the next run
after a kill. Its comment says whose it is: ``clusterctl-relay:CLUSTER:PLACE:MADE:ID``. A *place* is the folder around a
transfer's own, which a command's lock guards: so nobody removes the keys of a transfer that is under way elsewhere, but
anybody those that were made long ago.
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
# What no quoting carries through every login shell: csh has its own '!', fish its own backslash.
_UNSPEAKABLE = re.compile(r"['\"\\!\x00-\x1f]")
PATIENCE = 100  # tenths of a second after which whoever writes to a shared home counts as dead
LIFE = 24 * 3600  # seconds until sshd takes a key no more; after twice that anybody may remove it
CONNECT = 8  # seconds until a way between two nodes counts as shut
_PERSIST = 120  # seconds that a connection which nothing uses stays open
_SOCKET = 80  # letters of a folder in which ssh can make a socket: 108, less the name and a random one before it
ALIVE = 5  # seconds between two questions whether the next node is there; the third without an answer ends it


def place_of(folder: str) -> str:
    """The place of a transfer whose own folder this is."""
    return str(PurePosixPath(folder).parent)


def comment(inventory: Inventory, place: str = "") -> str:
    """How the comment begins of every line in ``authorized_keys`` that is the cluster's, or of those of one place."""
    return f"clusterctl-relay:{_hash(str(inventory.root))}:" + (f"{_hash(place)}:" if place else "")


def secret_names(inventory: Inventory, place: str) -> str:
    """How the names of the folders begin that hold private keys."""
    return f"clusterctl-relay-{_hash(f'{inventory.root}:{place}')}-"


def left(inventory: Inventory, place: str) -> Mapping[str, object]:
    """What the scripts must know that look for what relays have left."""
    return {
        "tag": comment(inventory, place),
        "secrets": secret_names(inventory, place),
        "place": place,
        "now": int(time.time()),
        "life": LIFE,
    }


def forget(inventory: Inventory, place: str, folder: str = "") -> str:
    """The script that takes back what the relays of a place have left on a node, in this run or another.

    With a transfer's folder also the processes that still run in it.
    """
    values = {"line": "", "options": "", "patience": PATIENCE}
    return render("transfer/forget.sh.j2", folder=folder, **values, **left(inventory, place))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def speakable(folder: str) -> bool:
    """Whether a forced command can name a file in this folder, whatever the login shell is."""
    return not _UNSPEAKABLE.search(folder)


@dataclass(frozen=True)
class RelayKey:
    """One transfer's key pair."""

    private: str
    public: str
    made: int
    number: str

    @classmethod
    def new(cls) -> RelayKey:
        """A new key for one transfer."""
        # Imported with the first key: --help needs none of it.
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415

        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        return cls(private.decode("ascii"), public.decode("ascii"), int(time.time()), secrets.token_hex(6))

    def line(self, inventory: Inventory, place: str) -> str:
        """The line for ``authorized_keys``, without its options."""
        return f"{self.public} {comment(inventory, place)}{self.made}:{self.number}"

    def secret(self, inventory: Inventory, place: str) -> str:
        """The name of the folder that holds the private key."""
        return secret_names(inventory, place) + self.number


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
