"""The first contact with a node: pins its host key, and installs a public key if only a password logs in.

Changes nothing else on the node; a second run changes nothing.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from provision.errors import UsageError
from provision.model import Inventory, Node, Step
from provision.render import quote, render
from provision.script import compile_steps, parse
from provision.ssh.remote import NodeUnreachable, connect

if TYPE_CHECKING:
    from provision.model import Remote
    from provision.ssh.remote import Connections

_KEY_NAME = "clusterctl_key"
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_PATIENCE = 100  # tenths of a second after which another writer to a shared home counts as dead
_DEADLINE = 60.0  # seconds; there may be several writers to wait for


@dataclass(frozen=True)
class Enrolled:
    """A node that is ready: its host key is pinned and a key logs in."""

    node: str
    state: Literal["ready", "key installed"]


def enrol(inventory: Inventory, node: Node, pool: Connections) -> Enrolled:
    """Make a node reachable without questions.

    If no key logs in, the public half of the inventory's key (or of ``~/.ssh/id_ed25519``) is added to the node's
    ``authorized_keys``, over a login with the password.

    Raises:
        RemoteError: the node could not be enrolled.
    """
    remote = pool[node]
    if remote.by_key or node.is_local:
        return Enrolled(node.name, "ready")
    _install(inventory, remote)
    try:
        connect(inventory, node).close()  # without prompts: only a key can log in
    except NodeUnreachable as error:
        raise NodeUnreachable(
            node,
            f"the key was installed, but {error.reason}",
            hint=error.hint
            if "passphrase" in error.reason
            else "check on the node: PubkeyAuthentication, AuthorizedKeysFile, and who may write to the home folder",
        ) from error
    return Enrolled(node.name, "key installed")


def _install(inventory: Inventory, remote: Remote) -> None:
    line = public_key(inventory)
    blob = line.split()[1]
    step = Step(
        "public key",
        # A commented-out key does not count.
        unless=f'cd\ngrep -q -- "^[^#]*"{quote(blob)} .ssh/authorized_keys\n',
        do=render("enrol/install_key.sh.j2", line=line, blob=blob, patience=_PATIENCE),
    )
    token = secrets.token_hex(8)
    answer = remote.run(compile_steps([step], token=token), deadline=_DEADLINE)
    results = parse(token, answer.out)
    if answer.rc == 0 and results:
        return
    why = results[-1].detail if results else answer.err.strip()
    raise NodeUnreachable(remote.node, f"its authorized_keys cannot be written: {why or 'no reason given'}")


# --- keys ----------------------------------------------------------------------------------------


def create_key(path: Path) -> bool:
    """Write an ed25519 key pair to ``path`` and ``path.pub`` unless there is one. Returns whether it was written."""
    if path.exists():
        return False
    secret = Ed25519PrivateKey.generate()
    private = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = _public_line(secret, comment="clusterctl")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        Path(f"{path}.pub").write_text(public + "\n", "ascii")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(private)
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"the ssh key {path} cannot be written: {error.strerror}") from error
    return True


def public_key(inventory: Inventory) -> str:
    """The line for ``authorized_keys``: the public half of the key that connections use.

    Raises:
        UsageError: there is no key, or only a private one with a passphrase.
    """
    key = inventory.ssh.key
    places = [key] if key else [Path.home() / ".ssh" / name for name in _DEFAULT_KEYS]
    for place in places:
        with suppress(OSError):
            words = Path(f"{place}.pub").read_text("utf-8").split(maxsplit=2)
            if len(words) >= 2:
                return " ".join(word.strip() for word in words)
        if place.exists():
            return _public_half(place)
    raise UsageError(
        "there is no ssh key to install on the nodes",
        hint=f"write `ssh: {{key: {_KEY_NAME}}}` into {inventory.path.name}; to create that file: clusterctl init",
    )


def _public_half(place: Path) -> str:
    try:
        return _public_line(serialization.load_ssh_private_key(place.read_bytes(), None))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"the public half of {place} cannot be read", hint=f"ssh-keygen -y -f {place} > {place}.pub"
        ) from error


def _public_line(secret: Any, comment: str = "") -> str:
    public: bytes = secret.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{public.decode('ascii')} {comment}".rstrip()


def default_key() -> str | None:
    """The name of a key to create next to a new inventory; None if the user has a key that ssh finds automatically."""
    own = os.environ.get("SSH_AUTH_SOCK") or any((Path.home() / ".ssh" / key).exists() for key in _DEFAULT_KEYS)
    return None if own else _KEY_NAME
