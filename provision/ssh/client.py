"""The client that Fabric opens, with clusterctl's socket, host keys and logins instead of paramiko's.

Host keys are checked before the login. The user is asked to confirm an unknown key, or it is refused; a changed key is
always refused.
"""

from __future__ import annotations

import base64
import os
import socket
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko

from provision.render import quote
from provision.ssh import hostkeys
from provision.ssh.prompts import PasswordRefused, Passwords
from provision.ssh.proxy import Proxy
from provision.ssh.wire import HostKeyChanged, HostKeyUnknown, NodeUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from provision.model import Node, Ssh
    from provision.ssh.prompts import Prompts

# AES-GCM first: one pass with the processor's own instructions; paramiko itself prefers CTR with a separate MAC.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
KEEPALIVE = 15  # seconds
IDLE = 1.0  # seconds between looks at the keep-alive timer; paramiko wakes ten times a second for every connection
DEAD_AFTER = 60  # seconds without an acknowledgement until the kernel closes a connection


class Questions:
    """The prompts, shared by the connections of one command so that one question is asked at a time."""

    def __init__(self, prompts: Prompts | None) -> None:
        self.prompts = prompts
        self.passwords = Passwords(prompts.password) if prompts else None
        self.lock = threading.Lock()


class Client(paramiko.SSHClient):
    """One connection attempt to one host, with the interface that Fabric expects."""

    def __init__(self, ssh: Ssh, questions: Questions, node: Node, alias: str | None) -> None:
        super().__init__()
        self.by_key = False
        self.lock = threading.Lock()
        self._ssh = ssh
        self._questions = questions
        self._node = node
        self._alias = alias

    def connect(  # type: ignore[override]
        self, hostname: str, port: int, username: str, sock: Any = None, key_filename: Iterable[str] = (), **_: object
    ) -> None:
        """Connect, check the host key, log in."""
        timeout = self._ssh.timeout
        name = self._alias or hostkeys.host_name(hostname, port)
        known = hostkeys.look_up(name, hostkeys.files(self._ssh.known_hosts))
        transport = paramiko.Transport(sock or _socket(hostname, port, timeout))
        self._transport = transport
        if not isinstance(sock, Proxy):  # a socket, or a channel of a jump host
            transport.sock.settimeout(IDLE)
        transport.daemon = True
        transport.banner_timeout = transport.handshake_timeout = timeout
        transport.auth_timeout = max(30.0, timeout)
        transport.channel_timeout = max(30.0, timeout)
        options = transport.get_security_options()
        options.ciphers = CIPHERS
        # Pinned types first, so that a node with several keys shows one that can be compared.
        pinned = [kind for key in known if not key.revoked for kind in _algorithms(key.kind)]
        options.key_types = [*(kind for kind in options.key_types if kind in pinned)] + [
            kind for kind in options.key_types if kind not in pinned
        ]
        try:
            self._start(transport, sock, timeout)
            transport.set_keepalive(KEEPALIVE)
            self._check(name, transport.get_remote_server_key(), known)
            self.by_key = log_in(
                transport,
                self._node,
                username,
                f"{hostname} port {port}" if port != 22 else hostname,
                only=self._ssh.key,
                configured=list(key_filename),
                passwords=self._questions.passwords,
            )
        except paramiko.SSHException as error:
            _drop(transport, sock)
            if "protocol banner" in str(error) and not isinstance(error.__context__, TimeoutError):
                raise Retry(
                    f"{hostname} port {port} closed the connection before its ssh banner",
                    "MaxStartups or a firewall on the node?",
                ) from error
            raise
        except BaseException:
            _drop(transport, sock)
            raise

    @staticmethod
    def _start(transport: paramiko.Transport, sock: Any, timeout: float) -> None:
        """Exchange keys. If the ProxyCommand failed, its error is raised."""
        try:
            transport.start_client(timeout=timeout + 1)
            if not transport.initial_kex_done:
                raise TimeoutError
        except (paramiko.SSHException, EOFError, OSError):
            if isinstance(sock, Proxy) and sock.failure:
                raise sock.failure from None
            raise

    def _check(self, name: str, key: paramiko.PKey, known: list[hostkeys.KnownKey]) -> None:
        """Compare the node's host key with the known ones.

        Raises:
            HostKeyChanged: it is another one, or revoked.
            HostKeyUnknown: it is not pinned and was not confirmed.
        """
        blob, kind = key.asbytes(), key.get_name()
        shown = hostkeys.fingerprint(blob)
        prompts, node = self._questions.prompts, self._node
        pinned = self._ssh.known_hosts
        for mine in known:
            if mine.revoked and mine.blob == blob:
                raise HostKeyChanged(node, f"host key {shown} is revoked in {mine.file}")
        trusted = [mine for mine in known if not mine.revoked]
        if not trusted and prompts:
            with self._questions.lock:
                trusted = [mine for mine in hostkeys.look_up(name, [pinned]) if not mine.revoked]
                if not trusted:
                    if not prompts.confirm_host_key(node, kind, shown):
                        raise HostKeyUnknown(node, f"its host key {shown} ({kind}) was not confirmed")
                    hostkeys.pin(name, kind, blob, pinned)
                    return
        if not trusted:
            raise HostKeyUnknown(node, f"its host key {shown} ({kind}) is not pinned", hint="clusterctl init")
        if any(mine.blob == blob for mine in trusted):
            return
        other = next((mine for mine in trusted if mine.kind == kind), trusted[0])
        raise HostKeyChanged(
            node,
            f"its host key has changed: {other.fingerprint} ({other.kind}) is pinned in {other.file}, "
            f"the node shows {shown} ({kind})",
            hint=f"if it was reinstalled: ssh-keygen -R {quote(name)} -f {quote(other.file)}, then clusterctl init",
        )


def _drop(transport: paramiko.Transport, sock: object) -> None:
    """Close a transport and its proxy, which a transport that has not started leaves open."""
    hang_up(transport)
    if isinstance(sock, Proxy):
        sock.close()


def _socket(host: str, port: int, timeout: float) -> socket.socket:
    sock = socket.create_connection((host, port), timeout)
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # paramiko does not set it: small packets would wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER * 1000)
    return sock


def _algorithms(kind: str) -> tuple[str, ...]:
    """The host key algorithms that prove a key of type ``kind``."""
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


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
        stat = file.stat()
        key = _load(file, stat.st_mtime_ns)
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


@lru_cache(maxsize=16)  # every node is offered the same keys
def _load(file: Path, _changed: int) -> paramiko.PKey:
    return paramiko.PKey.from_path(file)


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
        if isinstance(transport.sock, socket.socket):
            transport.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which ``close`` waits for
        elif isinstance(transport.sock, paramiko.Channel):
            transport.sock.close()
    with suppress(paramiko.SSHException, EOFError, OSError):
        transport.close()


def text_of(error: object) -> str:
    """The message of an exception, or its class name if it has none."""
    return (str(error) or type(error).__name__) if error is not None else "closed by the node"
