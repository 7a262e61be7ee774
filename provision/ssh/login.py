"""Logs in: with keys first, then with the password, which the user is asked for once."""

from __future__ import annotations

import base64
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from provision.render import quote
from provision.ssh.prompts import PasswordRefused, Passwords
from provision.ssh.wire import NodeUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from provision.model import Node


class Retry(Exception):  # noqa: N818 - never leaves this package
    """The attempt failed and is worth repeating. ``reason`` is shown if it was the last one."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def log_in(
    transport: paramiko.Transport,
    node: Node,
    user: str,
    where: str,
    *,
    only: Path | None,
    configured: list[str],
    passwords: Passwords | None,
) -> bool:
    """Log in as ``user``. Returns whether keys alone were enough.

    Args:
        transport: a connection whose host key has been checked.
        node: for messages.
        user: the user on the node.
        where: the host, for messages.
        only: the inventory's key; no other key is offered.
        configured: the key files in ssh_config.
        passwords: asks for the password; None: the user cannot be asked.

    Raises:
        NodeUnreachable: the login was refused.
        Retry: the node closed the connection while the user typed.
    """
    notes: dict[str, str] = {}
    allowed = _offer_nothing(transport, user)
    if not allowed:
        return True
    if "publickey" in allowed:
        for key in _keys(only, configured, notes):
            try:
                allowed = transport.auth_publickey(user, key)
            except paramiko.AuthenticationException:
                if transport.is_active():
                    continue
                raise NodeUnreachable(
                    node,
                    f"{user} at {where}: too many keys were refused",
                    hint="name the right key as ssh.key in the inventory",
                ) from None
            if not allowed:
                return True
            break  # accepted, but the node requires a password as well
    why = "; ".join(notes) or "no key was accepted"
    fix = "; ".join(filter(None, notes.values()))
    if not {"password", "keyboard-interactive"} & set(allowed):
        raise NodeUnreachable(
            node,
            f"login as {user} at {where} refused: {why}",
            hint=fix or "is this the right user, and is the key in its authorized_keys?",
        )
    if passwords is None or (only and fix):  # a key that the user can fix is not replaced by a password
        why = f"login as {user} at {where} needs a password: {why}"
        raise NodeUnreachable(node, why, hint=fix or "clusterctl init")
    try:
        passwords.try_at(user, where, lambda password: _try_password(transport, user, password))
    except PasswordRefused as refused:
        raise NodeUnreachable(node, f"login at {where}: {refused}") from None
    return False


def _offer_nothing(transport: paramiko.Transport, user: str) -> list[str]:
    """The methods that the node accepts; empty if it needed none and the login is done."""
    try:
        transport.auth_none(user)
    except paramiko.BadAuthenticationType as error:
        return list(error.allowed_types)
    return []


def _keys(only: Path | None, configured: list[str], notes: dict[str, str]) -> Iterator[paramiko.PKey]:
    """The keys to try, in order. ``notes`` receives each key's problem with its fix, or an empty text."""
    agent = paramiko.Agent()
    try:
        held = {key.asbytes(): key for key in agent.get_keys()}
    except (paramiko.SSHException, OSError):
        held = {}
    try:
        files = [only] if only else [Path(name).expanduser() for name in configured]
        if not only:
            files += [Path.home() / ".ssh" / f"id_{kind}" for kind in ("ed25519", "ecdsa", "rsa")]
            yield from held.values()
        for file in dict.fromkeys(files):
            if (file.exists() or file == only) and (key := _key(file, held, notes, only=bool(only))):
                yield key
    finally:
        agent.close()


def _key(file: Path, held: Mapping[bytes, paramiko.PKey], notes: dict[str, str], *, only: bool) -> paramiko.PKey | None:
    """The key in a file, or the agent's copy of it; None with a note if it cannot be used."""
    try:
        key = paramiko.PKey.from_path(file)
        stat = file.stat()
    except (paramiko.PasswordRequiredException, TypeError):
        if (public := _public_blob(file)) and public in held:
            return held[public] if only else None  # otherwise it was tried with the agent's other keys
        notes[f"{file} has a passphrase and is not in the agent (ssh-add {file})"] = ""
    except FileNotFoundError:
        notes[f"{file} does not exist"] = ""
    except (paramiko.SSHException, OSError, ValueError) as error:
        notes[f"{file} cannot be read: {text_of(error)}"] = ""
    else:
        # Reported now rather than when bytes are sent: the system's ssh refuses such a key.
        if stat.st_uid != os.getuid() or not stat.st_mode & 0o077 or key.asbytes() in held:
            return key
        notes[f"other users may read {file}, so ssh refuses it"] = f"chmod 600 {quote(file)}"
    return None


def _try_password(transport: paramiko.Transport, user: str, password: str) -> bool:
    if not transport.is_active():  # the node waits only so long for the user to type
        raise Retry("the node closed the connection while the password was typed")
    try:
        # As bytes: the password need not be UTF-8.
        return not transport.auth_password(user, password.encode("utf-8", "surrogateescape"))  # type: ignore[arg-type]
    except paramiko.AuthenticationException:
        return False


def _public_blob(private: Path) -> bytes | None:
    with suppress(OSError, IndexError, ValueError):
        return base64.b64decode(Path(f"{private}.pub").read_text("utf-8").split()[1])
    return None


def hang_up(transport: paramiko.Transport) -> None:
    """Close a connection in any state; through a dead jump host even closing fails."""
    with suppress(paramiko.SSHException, EOFError, OSError):
        transport.close()


def text_of(error: object) -> str:
    """The message of an exception, or its class name if it has none."""
    return (str(error) or type(error).__name__) if error is not None else "closed by the node"
