"""A real sshd on 127.0.0.1 with its own users, for what a sandbox node cannot show: other login shells, passwords,
several host keys, a server that stops. Its users exist only in the mount namespace of that one process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path, PurePosixPath

from provision.model import Inventory, Node, Ssh

PASSWORD = "correct horse"


class LocalSshd:
    """One sshd. ``users`` maps names to login shells; each has its own home and ``PASSWORD``."""

    def __init__(
        self, folder: Path, users: dict[str, str], options: str = "", host_keys: tuple[str, ...] = ("ed25519",)
    ):
        self.folder = folder
        self.folder.mkdir(parents=True, mode=0o700)
        self.users = users
        self.port = free_port()
        self.key = make_key(folder / "user_key")
        for user in users:
            ssh = self.home(user) / ".ssh"
            ssh.mkdir(parents=True, mode=0o700)
            shutil.copy(f"{self.key}.pub", ssh / "authorized_keys")
        self.host_keys = [make_key(folder / f"host_{kind}", kind) for kind in host_keys]
        (folder / "sshd_config").write_text(
            options  # first: sshd takes the first of two lines
            + "".join(f"HostKey {key}\n" for key in self.host_keys)
            + f"Port {self.port}\nListenAddress 127.0.0.1\nPidFile none\nUsePAM no\nPermitRootLogin yes\n"
            "AuthorizedKeysFile .ssh/authorized_keys\nPrintMotd no\nPrintLastLog no\nMaxStartups 100\n"
        )
        crypted = subprocess.run(
            ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, text=True, stdout=subprocess.PIPE, check=True
        ).stdout.strip()
        passwd, shadow = Path("/etc/passwd").read_text(), Path("/etc/shadow").read_text()
        for user, shell in users.items():
            passwd += f"{user}:x:0:0::{self.home(user)}:{shell}\n"
            shadow += f"{user}:{crypted}:19000:0:99999:7:::\n"
        (folder / "passwd").write_text(passwd)
        (folder / "shadow").write_text(shadow)
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        script = (
            'mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/shadow" /etc/shadow'
            ' && exec /usr/sbin/sshd -D -e -f "$1/sshd_config"'
        )
        self.process = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", script, "sh", self.folder], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr
        message = []
        for line in self.process.stderr:
            message.append(line)
            if "Server listening" in line:
                break
        else:
            raise RuntimeError("sshd did not start: " + "".join(message))
        self._listening = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._listening.start()

    def home(self, user: str) -> Path:
        return self.folder / "homes" / user

    def node(self, user: str, name: str | None = None) -> Node:
        return Node(name or user, "127.0.0.1", user=user, port=self.port)

    def inventory(self, *nodes: Node, key: Path | None = None, known: bool = True, timeout: float = 10) -> Inventory:
        """An inventory in a new folder, with the host keys pinned or not."""
        folder = self.folder / f"inventory {secrets.token_hex(4)}"
        folder.mkdir()
        if known:
            (folder / "known_hosts").write_text(self.known_hosts())
        return Inventory(
            path=folder / "inventory.yaml",
            prefix=PurePosixPath("/opt/env"),
            nodes=nodes,
            ssh=Ssh(key=key or self.key, known_hosts=folder / "known_hosts", timeout=timeout),
        )

    def known_hosts(self) -> str:
        return "".join(f"[127.0.0.1]:{self.port} {Path(f'{key}.pub').read_text()}" for key in self.host_keys)

    def connections(self) -> int:
        """The number of open connections: sshd has a child process for each."""
        assert self.process
        pid = self.process.pid
        return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def cut(self) -> None:
        """End every connection as if the node had lost power; the listener stays."""
        assert self.process
        for pid in reversed(children(self.process.pid)):  # sshd first: a script whose program dies would still report
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process:
            self.cut()
            self.process.kill()
            self.process.wait()
            self._listening.join(5)
            assert self.process.stderr
            self.process.stderr.close()


def children(pid: int) -> list[int]:
    """The processes below ``pid``, deepest first."""
    found = []
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [*children(int(child)), int(child)]
    return found


def make_key(path: Path, kind: str = "ed25519") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", path], check=True)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
