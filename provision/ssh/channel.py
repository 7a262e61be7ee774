"""A running remote command over paramiko: its outputs, its input and its end."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import paramiko

from provision.ssh.framing import BOOTSTRAP, frame
from provision.ssh.login import hang_up
from provision.ssh.wire import STOP

if TYPE_CHECKING:
    from collections.abc import Callable


class ChannelStream:
    """paramiko's channel as a ``wire.Stream``."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self.group: int | None = None
        self.stop: Callable[[int], None] | None = None  # ends a process group that this user may not end
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
        """Send all of ``data``; OSError when nobody takes it any more."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), 1 << 15):  # sendall copies what is left after every packet
                self._channel.sendall(view[start : start + (1 << 15)].tobytes())
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def finish(self) -> None:
        """The input is complete."""
        try:
            self._channel.shutdown_write()
        except (paramiko.SSHException, EOFError) as error:
            raise OSError(str(error)) from error

    def abort(self) -> None:
        """Stop the script first: to it, a closed channel alone would look like the end of its input."""
        polite = threading.Thread(target=self._end, daemon=True)
        polite.start()
        polite.join(4)
        if polite.is_alive():  # the connection takes no bytes any more
            hang_up(self._channel.get_transport())

    def close(self) -> None:
        """Hang up."""
        threading.Thread(target=self._hang_up, daemon=True).start()  # it may wait for a connection that takes nothing

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
        self._hang_up()

    def _hang_up(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()
