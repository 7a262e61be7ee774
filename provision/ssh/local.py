"""This machine as a ``Remote``: the same scripts in the same way, without ssh."""

from __future__ import annotations

import getpass
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.ssh.become import Ascent, Sudo
from provision.ssh.framing import BOOTSTRAP, OutputTooLong
from provision.ssh.openssh import ProcessStream
from provision.ssh.wire import STOP, Broken, DeadlineExceeded, Expired, NodeUnreachable, converse, too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from provision.model import Node, Result

_PATIENCE = 2.0  # seconds that a script has to clean up after it was told to end
_LOOK = 0.02  # seconds between looks whether it has


class LocalRemote:
    """A node that is this machine; see ``model.Remote``. Each script is a process group of its own."""

    by_key = False  # no ssh of the system's reaches it

    def __init__(self, node: Node, *, sudo: Sudo | None = None) -> None:
        self.node = node
        self._sudo = sudo or Sudo(None)
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether it takes scripts: until it is closed."""
        return not self._closed

    @property
    def host_key(self) -> tuple[str, bytes]:
        """This machine shows none.

        Raises:
            NodeUnreachable: always.
        """
        raise NodeUnreachable(
            self.node, "it is this machine, which other nodes cannot be sent to by its address `local`"
        )

    def run(
        self,
        script: str,
        *,
        stdin: Iterable[bytes] | None = None,
        on_line: Callable[[str], None] | None = None,
        deadline: float | None = None,
        root: bool = False,
    ) -> Result:
        """See ``model.Remote.run``. It starts in the home folder, as a login does."""
        ascent = Ascent(self.node, getpass.getuser(), self._sudo) if root and os.geteuid() != 0 else None
        with self._lock:
            if self._closed:
                raise NodeUnreachable(self.node, "the program is ending")
            stream = _Stream(self._stop_as_root if ascent else _stop)
            self._streams.add(stream)
        try:
            return converse(stream, script, stdin=stdin, on_line=on_line, deadline=deadline, handover=ascent)
        except Expired:
            raise DeadlineExceeded(self.node, f"not finished within {deadline:g} s") from None
        except OutputTooLong as error:
            raise too_long(self.node, error) from None
        except Broken as broken:
            refused = ascent.why_ended() if ascent and not broken.begun else None
            raise refused or NodeUnreachable(self.node, "the script was killed") from None
        finally:
            with self._lock:
                self._streams.discard(stream)

    def close(self) -> None:
        """End what still runs."""
        with self._lock:
            self._closed = True
            streams = tuple(self._streams)
        for stream in streams:
            stream.abort()

    def _stop_as_root(self, group: int) -> None:
        """End a process group of root's, which this user may not."""
        beside = _Stream(_stop)
        with suppress(ClusterctlError, Broken, Expired, OutputTooLong):
            ascent = Ascent(self.node, getpass.getuser(), self._sudo)
            converse(beside, STOP.format(group=group), deadline=_PATIENCE, handover=ascent)


class _Stream(ProcessStream):
    """A bootstrap on this machine. ``stop`` ends the script's process group, once that is known."""

    def __init__(self, stop: Callable[[int], None]) -> None:
        home = Path.home()
        super().__init__(["/bin/sh", "-c", BOOTSTRAP], None, folder=home if home.is_dir() else Path("/"))
        self._stop = stop

    def abort(self) -> None:
        """Tell the script to end, and end it when it does not: its group, whatever it has started in it."""
        group = self._process.pid  # of a session of its own; not reaped yet, so the number is nobody else's
        if self._process.returncode is not None:
            return
        if self.group:
            self._stop(self.group)
            until = time.monotonic() + _PATIENCE
            while _members(group) and time.monotonic() < until:
                time.sleep(_LOOK)  # the end of a group can be waited for by nobody
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _stop(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)


def _members(group: int) -> bool:
    """Whether a living process is in a process group: the fifth field of /proc/PID/stat (proc(5))."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found, *_ = path.read_bytes().rpartition(b")")[2].split()
            if int(found) == group and state not in b"ZX":
                return True
    return False
