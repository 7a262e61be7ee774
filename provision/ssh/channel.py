"""A remote command over paramiko: its outputs, its input and its end."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import paramiko

from provision.ssh.framing import BOOTSTRAP, frame
from provision.ssh.login import hang_up
from provision.ssh.wire import STOP, drain

if TYPE_CHECKING:
    from collections.abc import Callable


class ChannelStream:
    """paramiko's channel as a ``wire.Stream``."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.group: int | None = None
        self.stop: Callable[[int], None] | None = None  # ends a process group that belongs to root
        self._channel = channel

    def read_out(self) -> bytes:
        """Some bytes of stdout; empty at its end."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            return self._channel.recv(1 << 17)
        return b""

    def read_err(self) -> bytes:
        """Some bytes of stderr; empty at its end."""
        with suppress(paramiko.SSHException, EOFError, OSError):
            return self._channel.recv_stderr(1 << 17)
        return b""

    def write(self, data: bytes) -> None:
        """Send all of ``data``; OSError if the command no longer reads."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), 1 << 15):  # sendall copies the rest after every packet
                self._channel.sendall(view[start : start + (1 << 15)].tobytes())
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """End the input."""
        try:
            self._channel.shutdown_write()
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def abort(self) -> None:
        """Stop the script before closing the channel, which would look to it like the end of its input."""
        stopper = threading.Thread(target=self._end, daemon=True)
        stopper.start()
        stopper.join(6)
        if stopper.is_alive():  # the connection takes no more bytes
            hang_up(self._channel.get_transport())

    def close(self) -> None:
        """Close the channel."""
        threading.Thread(target=self._hang_up, daemon=True).start()  # a dead connection would block it

    def _end(self) -> None:
        channel = self._channel
        with suppress(paramiko.SSHException, EOFError, OSError):
            if self.group and not channel.closed and self.stop:
                self.stop(self.group)
            elif self.group and not channel.closed:
                beside = channel.get_transport().open_session(timeout=2)
                beside.settimeout(2)
                beside.exec_command(BOOTSTRAP)
                script = STOP.format(group=self.group)
                beside.sendall(frame(script, "stop"))
                while beside.recv(1 << 10):
                    pass
                beside.close()
            if self.group and not channel.closed:
                drain(self)
        self._hang_up()

    def _hang_up(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()
