"""ssh_config's ``ProxyCommand``, run by a shell as in ssh. paramiko's has no shell, and spins when it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from contextlib import suppress

from provision.ssh.fanout import all_cores

_KEPT = 300  # bytes of its stderr


class ProxyFailedError(ConnectionError):
    """The command exited; the message has its status and output."""


class Proxy:
    """A command that carries a connection over its input and output, with the socket methods that paramiko needs."""

    def __init__(self, command: str) -> None:
        shell = os.environ.get("SHELL") or "/bin/sh"
        with all_cores():
            self._process = subprocess.Popen(
                [shell, "-c", f"exec {command}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        self._timeout: float | None = None
        self._closing = threading.Lock()
        self._stderr = b""
        self.failure: ProxyFailedError | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def send(self, data: bytes) -> int:
        """Send some bytes. Returns how many."""
        assert self._process.stdin
        try:
            return self._process.stdin.write(data) or 0
        except (OSError, ValueError):
            raise self._failure() from None

    def recv(self, size: int) -> bytes:
        """The next bytes; TimeoutError if none came in time."""
        assert self._process.stdout
        try:
            ready, _, _ = select.select([self._process.stdout], [], [], self._timeout)
            data = os.read(self._process.stdout.fileno(), size) if ready else None
        except (OSError, ValueError):
            raise self._failure() from None
        if data is None:
            raise TimeoutError
        if not data:
            raise self._failure()
        return data

    def settimeout(self, seconds: float | None) -> None:
        """How long ``recv`` waits."""
        self._timeout = seconds

    def close(self) -> None:
        """End the command and its children."""
        assert self._process.stdin
        with self._closing:
            if self._process.stdin.closed:
                return
            self._end(signal.SIGTERM)
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                self._end(signal.SIGKILL)
                self._process.wait()
            self._listener.join(1)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe:
                    pipe.close()

    @property
    def closed(self) -> bool:
        """Whether the command has exited."""
        return self._process.poll() is not None

    @property
    def _closed(self) -> bool:  # paramiko asks for this name
        return self.closed

    def _end(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _listen(self) -> None:
        assert self._process.stderr
        with suppress(OSError, ValueError):
            while data := self._process.stderr.read(4096):
                self._stderr = (self._stderr + data)[-_KEPT:]

    def _failure(self) -> ProxyFailedError:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._listener.join(1)
        printed = " ".join(self._stderr.decode("utf-8", "replace").split())
        self.failure = ProxyFailedError(
            f"its ProxyCommand ended with status {self._process.poll()}{f': {printed}' if printed else ''}"
        )
        return self.failure
