"""The system's ssh as a ``Remote``, for large transfers.

Each OpenSSH process encrypts on its own core; paramiko's streams would share one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.render import quote
from provision.ssh import hostkeys
from provision.ssh.fanout import all_cores
from provision.ssh.wire import (
    BOOTSTRAP,
    STOP,
    Broken,
    DeadlineExceeded,
    Expired,
    HostKeyChanged,
    HostKeyUnknown,
    NodeUnreachable,
    OutputTooLong,
    RootRefused,
    converse,
    drain,
    too_long,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from provision.model import Inventory, Node, Remote, Result

CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr,aes256-ctr"

# A part of ssh's message, the reason, and a hint.
_REASONS = (
    ("Connection refused", "the node refuses connections", "is sshd running there, and on this port?"),
    ("timed out", "no answer from the node", "is the node up, and does the firewall allow ssh?"),
    ("Could not resolve hostname", "its name cannot be resolved", "write its IP address into the inventory"),
    ("No route to host", "there is no route to the node", ""),
    ("Network is unreachable", "there is no route to the node", ""),
    ("Too many authentication failures", "too many keys were refused", "name the right key as ssh.key"),
    ("Permission denied", "the login was refused", "clusterctl init"),
)


class OpenSshRemote:
    """A node that the system's ``ssh`` reaches; see ``model.Remote``. Every run opens its own connection.

    It cannot ask the user: the node's host key must be pinned and a key must log in.
    ``control`` is another connection to the node, used to stop a script whose stream was aborted. ``jump``: the jump
    host of the inventory that leads to the node.
    """

    def __init__(
        self,
        inventory: Inventory,
        node: Node,
        *,
        ssh: str = "ssh",
        control: Remote | None = None,
        jump: Node | None = None,
    ) -> None:
        self.node = node
        self._argv = ssh_argv(inventory, node, ssh=ssh, jump=jump)
        self._control = control
        self._streams: set[ProcessStream] = set()
        self._lock = threading.Lock()

    def run(
        self,
        script: str,
        *,
        stdin: Iterable[bytes] | None = None,
        on_line: Callable[[str], None] | None = None,
        deadline: float | None = None,
        root: bool = False,
    ) -> Result:
        """See ``model.Remote.run``. As root it runs over ``control``, which can ask for a password."""
        if root:
            if self._control is None:
                raise RootRefused(self.node, "this connection cannot become root")
            return self._control.run(script, stdin=stdin, on_line=on_line, deadline=deadline, root=True)
        try:
            stream = ProcessStream([*self._argv, BOOTSTRAP], self._control)
        except OSError as error:
            raise NodeUnreachable(self.node, f"{self._argv[0]} cannot be started: {error}") from error
        with self._lock:
            self._streams.add(stream)
        try:
            return converse(stream, script, stdin=stdin, on_line=on_line, deadline=deadline)
        except Expired:
            raise DeadlineExceeded(self.node, f"not finished within {deadline:g} s") from None
        except OutputTooLong as error:
            raise too_long(self.node, error) from None
        except Broken as broken:
            raise _reason(self.node, broken) from None
        finally:
            with self._lock:
                self._streams.discard(stream)

    def close(self) -> None:
        """Stop the scripts that are still running."""
        with self._lock:
            streams = tuple(self._streams)
        for stream in streams:
            stream.abort()


def ssh_argv(inventory: Inventory, node: Node, *, ssh: str = "ssh", jump: Node | None = None) -> list[str]:
    """The command that reaches ``node`` with the system's ssh, up to the remote command.

    ``ssh_config`` may set the route (address, jump hosts, user), but no prompts, shared connections or forwarding.
    ``jump`` replaces its jump hosts. ``ssh -J`` would not check that host's key in the inventory's file.
    """
    route = []
    if jump:
        words = [*_options(inventory, jump, ssh), "-W"]
        command = " ".join(quote(word).replace("%", "%%") for word in words)
        route = ["-o", f"ProxyCommand={command} '[%h]:%p' -- {quote(jump.address)}"]
    return [*_options(inventory, node, ssh), *route, "--", node.address]


def _options(inventory: Inventory, node: Node, ssh: str) -> list[str]:
    settings = inventory.ssh
    known = [file for file in hostkeys.files(settings.known_hosts) if file != hostkeys.SYSTEM_FILE]
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": " ".join(_option_path(file) for file in known),
        "UpdateHostKeys": "no",
        "ConnectTimeout": str(max(1, round(settings.timeout))),
        "ServerAliveInterval": "5",  # a dead node delays the nodes after it in a relay
        "ServerAliveCountMax": "3",
        "Compression": "no",
        "Ciphers": CIPHERS,
        "ControlMaster": "no",
        "ControlPath": "none",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        # RemoteCommand exists since 7.6. This ignores all unknown options, because only the first IgnoreUnknown counts
        # and the user's ssh_config may need one.
        "IgnoreUnknown": "*",
        "RemoteCommand": "none",
        "RequestTTY": "no",
        "LogLevel": "ERROR",
    }
    argv = [ssh]
    for name, value in options.items():
        argv += ["-o", f"{name}={value}"]
    if settings.key:
        argv += ["-o", f"IdentityFile={_option_path(settings.key)}", "-o", "IdentitiesOnly=yes"]
    if user := node.user or settings.user:
        argv += ["-l", user]
    if port := node.port or settings.port:
        argv += ["-p", str(port)]
    return argv


def bulk(inventory: Inventory, node: Node, fallback: Remote) -> Remote:
    """The fastest connection for many bytes: the system's ssh if it exists and a key is enough, else ``fallback``."""
    ssh = shutil.which("ssh")
    if ssh and getattr(fallback, "by_key", False):
        return OpenSshRemote(inventory, node, ssh=ssh, control=fallback, jump=getattr(fallback, "jump", None))
    return fallback


def _option_path(path: Path) -> str:
    """A path in an option of ssh: quoted, with ``%`` escaped."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'


def _reason(node: Node, broken: Broken) -> NodeUnreachable:
    printed = " ".join(broken.err.split())
    if broken.begun:
        return NodeUnreachable(node, "the connection was lost" + (f": {printed[-200:]}" if printed else ""))
    if "IDENTIFICATION HAS CHANGED" in broken.err or "revoked" in broken.err:
        return HostKeyChanged(node, "its host key has changed", hint="to compare both fingerprints: clusterctl init")
    if "host key is known" in broken.err or "Host key verification failed" in broken.err:
        return HostKeyUnknown(node, "its host key is not pinned", hint="clusterctl init")
    for words, reason, hint in _REASONS:
        if words in broken.err:
            return NodeUnreachable(node, f"{reason} ({printed[-200:]})", hint=hint)
    printed = " ".join((broken.out + " " + broken.err).split())
    return NodeUnreachable(node, "ssh did not answer" + (f": {printed[-200:]}" if printed else ""))


class ProcessStream:
    """A running command, such as ``ssh``, as a ``wire.Stream``.

    It has its own session: no terminal, and no Ctrl-C from the user's.
    """

    def __init__(self, argv: list[str], control: Remote | None, *, folder: Path | None = None) -> None:
        self.group: int | None = None
        self._control = control
        with all_cores():
            self._process = subprocess.Popen(
                argv,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        self._writing = threading.Lock()

    def read_out(self) -> bytes:
        """Some bytes of stdout; empty at its end."""
        return self._read(self._process.stdout)

    def read_err(self) -> bytes:
        """Some bytes of stderr; empty at its end."""
        return self._read(self._process.stderr)

    def write(self, data: bytes) -> None:
        """Send all of ``data``; OSError if the command no longer reads."""
        view = memoryview(data)
        assert self._process.stdin
        try:
            with self._writing:
                while view:
                    view = view[self._process.stdin.write(view) :]
        except ValueError as error:  # already closed
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """End the input."""
        with self._writing:
            assert self._process.stdin
            self._process.stdin.close()

    def abort(self) -> None:
        """Stop the script over the other connection, and kill the process."""
        if self._control and self.group and self._process.poll() is None:
            with suppress(ClusterctlError):
                self._control.run(STOP.format(group=self.group), deadline=2)
                drain(self)
        self._kill()

    def close(self) -> None:
        """Wait briefly for the process to exit, then kill it, and close its pipes."""
        # ssh exits with the remote command, unless a background process holds the session open.
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        if self._writing.acquire(timeout=1):  # a write to a process that exited returns at once
            self._writing.release()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the group, for ProxyJump's and ProxyCommand's processes
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    @staticmethod
    def _read(pipe: IO[bytes] | None) -> bytes:
        assert pipe
        with suppress(OSError, ValueError):
            return pipe.read(1 << 17) or b""
        return b""
