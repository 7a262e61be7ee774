"""Files of a node come to this machine: only those that are not here yet, and never to another place than they should.

A file that is here with the same size and time is not sent again, so that a fetch that broke off goes on where it was.
What comes is written beside its place and moved there in one rename. Names come from the node and are believed
nothing: an entry that was not asked for, or that is anything but a plain file, ends the fetch.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.env.bundle.tar_reader import Member, TarError, TarReader
from provision.errors import ClusterctlError, UsageError
from provision.render import render
from provision.script import whole
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.model import Remote

_SIZE = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"-?[0-9]{1,11}")
_PART = ".clusterctl-part"
_LIST_DEADLINE = 300.0


@dataclass(frozen=True)
class There:
    """A file on a node: its size in bytes and the time of its last change in whole seconds."""

    size: int
    mtime: int


class Escape(ClusterctlError):  # noqa: N818 - what the node tried
    """A node sent what was not asked for."""

    exit_code = 5


def listed(remote: Remote, folder: str) -> dict[str, There]:
    """The files below a folder of a node, by their names relative to it; nothing where there is no such folder.

    Args:
        remote: the node.
        folder: an absolute path there.

    Raises:
        Escape: a name that leads out of the folder.
        RemoteError: the node does not answer.
    """
    script = render("run/list_files.sh.j2", folder=folder)
    out = remote.run(script, deadline=_LIST_DEADLINE).out
    with reading(remote.node):
        return parse_list(out, remote.node.name)


def parse_list(out: str, node: str) -> dict[str, There]:
    """Read a node's list of files.

    Raises:
        Escape: a name that leads out of the folder.
    """
    found = {}
    for entry in out.split("\0"):
        size, _, rest = entry.partition(" ")
        time, _, name = rest.partition(" ")
        seconds = time.partition(".")[0]
        if not (_SIZE.fullmatch(size) and _SECONDS.fullmatch(seconds) and name):
            continue
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise Escape(f"{node}: it names {name!r}, which leads out of the folder; nothing of it was taken")
        found[name] = There(whole(size), whole(seconds))
    return found


def lacking(there: Mapping[str, There], here: Path) -> dict[str, There]:
    """Those files that are not here with the same size and time."""
    return {name: file for name, file in there.items() if not _same(here / name, file)}


def fetch(remote: Remote, folder: str, wanted: Mapping[str, There], here: Path) -> int:
    """Bring files of a node here.

    Args:
        remote: the node.
        folder: where they lie there, an absolute path.
        wanted: by their names relative to ``folder``.
        here: where they will lie, under the same names.

    Returns:
        The bytes that came.

    Raises:
        Escape: the node sent what was not asked for.
        UsageError: this machine cannot write them.
        ClusterctlError: not all of them came.
    """
    if not wanted:
        return 0
    receiver = _Receiver(wanted, here, remote.node.name)
    script = render("run/send_files.sh.j2", folder=folder)
    try:
        receiver.start()
        result = remote.run(script, stdin=_names(wanted), on_line=receiver.line)
    finally:
        receiver.finish()
    if receiver.failure:
        raise receiver.failure
    if missing := sorted(set(wanted) - receiver.got):
        why = result.err.strip().splitlines()[0] if result.err.strip() else "it did not send them"
        raise ClusterctlError(f"{len(missing)} of {len(wanted)} files did not come, among them {missing[0]}: {why}")
    return receiver.bytes


def _names(wanted: Iterable[str]) -> Iterator[bytes]:
    for name in wanted:
        yield f"./{name}".encode("utf-8", "surrogateescape") + b"\0"


def _same(path: Path, file: There) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return (found.st_size, int(found.st_mtime)) == (file.size, file.mtime)


class _Receiver(threading.Thread):
    """Unpacks what comes, in a thread of its own: it reads from a pipe that what comes is written to."""

    def __init__(self, wanted: Mapping[str, There], here: Path, node: str) -> None:
        super().__init__(name=f"fetch-{node}", daemon=True)
        self.got: set[str] = set()
        self.bytes = 0
        self.failure: ClusterctlError | None = None
        self._wanted, self._here, self._node = wanted, here, node
        self._reader, self._writer = os.pipe()
        self._open = True

    def line(self, text: str) -> None:
        """Take a line of base64."""
        try:
            data = memoryview(base64.b64decode(text, validate=True))
            while data:
                data = data[os.write(self._writer, data) :]
        except binascii.Error as error:
            raise ClusterctlError(f"{self._node}: what came is damaged: {error}") from error
        except BrokenPipeError:
            raise self.failure or ClusterctlError(f"{self._node}: sent more than was asked for") from None

    def finish(self) -> None:
        """No more comes; wait until all that came is in its place."""
        if self._open:
            self._open = False
            os.close(self._writer)
            self.join()

    def run(self) -> None:
        """Unpack to the end."""
        try:
            with open(self._reader, "rb") as raw:  # noqa: PTH123 - a descriptor is no path
                archive = TarReader(raw.read)
                for member in archive:
                    self._take(archive, member)
        except ClusterctlError as error:
            self.failure = error
        except (TarError, EOFError) as error:
            if self.got != set(self._wanted):
                self.failure = ClusterctlError(f"{self._node}: what came broke off or is damaged: {error}")
        except (ValueError, OverflowError) as error:  # a time or a name that no file can have
            self.failure = ClusterctlError(f"{self._node}: what came cannot be unpacked: {error}")
        except OSError as error:
            self.failure = UsageError(f"cannot write {error.filename or self._here}: {error.strerror or error}")

    def _take(self, archive: TarReader, member: Member) -> None:
        name = member.name.removeprefix("./")
        if name not in self._wanted or member.kind not in ("file", "hard"):
            raise Escape(f"{self._node}: it sent {member.name!r}, which was not asked for; the fetch was ended")
        path = self._here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + _PART)
        if member.kind == "hard":  # a second name of a file that has come already
            target = member.target.removeprefix("./")
            if target not in self.got:
                raise Escape(f"{self._node}: it sent a link to {member.target!r}, which was not asked for")
            part.write_bytes((self._here / target).read_bytes())
        else:
            with part.open("wb") as file:
                for piece in archive.content():
                    file.write(piece)
                    self.bytes += len(piece)
        os.utime(part, (member.mtime, member.mtime))
        part.replace(path)
        self.got.add(name)
