"""Copies missing files from a node to this machine.

A file that exists here with the same size and time is not sent again, so an interrupted fetch continues. Each file is
written under another name and renamed when complete. Names from the node are not trusted: an entry that was not
requested, comes twice, or is not a plain file ends the fetch.

A node cannot use more of this machine's disk than its list says. The listed sizes of all running fetches are compared
with the free space first, and of each file no more bytes are kept than listed, since a log may have grown.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.env import text
from provision.env.bundle.tar import Member, TarError, TarReader
from provision.errors import ClusterctlError, UsageError
from provision.render import render
from provision.script import whole
from provision.ssh.remote import reading

if TYPE_CHECKING:
    from provision.model import Remote

_SIZE = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"-?[0-9]{1,11}")
_PART = ".clusterctl-part"
_PIECE = 1 << 20
_LIST_DEADLINE = 300.0
_NO_LIST = 9  # the script's exit code without a program that lists files
GROWN = 64 << 20  # bytes by which a node's files may have grown since it listed them
_MARGIN = 16 << 20  # bytes that stay free


@dataclass(frozen=True)
class RemoteFile:
    """A file on a node: its size in bytes and the time of its last change in whole seconds."""

    size: int
    mtime: int


class UnrequestedFile(ClusterctlError):  # noqa: N818 - the state of a node
    """A node sent something that was not requested."""

    exit_code = 5


def list_files(remote: Remote, folder: str) -> dict[str, RemoteFile]:
    """The files below a folder of a node, by their names relative to it; empty if the folder does not exist.

    Args:
        remote: the node.
        folder: an absolute path there.

    Raises:
        UnrequestedFile: a name that leads out of the folder.
        RemoteError: the node does not answer.
        ClusterctlError: the node has no program that lists files with their sizes.
    """
    script = render("run/list_files.sh.j2", folder=folder)
    result = remote.run(script, deadline=_LIST_DEADLINE)
    if result.rc == _NO_LIST:
        raise ClusterctlError(f"{remote.node.name}: the files in {folder} cannot be listed: {result.err.strip()}")
    with reading(remote.node):
        return parse_list(result.out, remote.node.name)


def parse_list(out: str, node: str) -> dict[str, RemoteFile]:
    """Read a node's list of files.

    Raises:
        UnrequestedFile: a name that leads out of the folder.
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
            raise UnrequestedFile(f"{node}: it listed {name!r}, which is outside the folder; nothing was fetched")
        found[name] = RemoteFile(whole(size), whole(seconds))
    return found


def lacking(there: Mapping[str, RemoteFile], here: Path) -> dict[str, RemoteFile]:
    """The files that do not exist here with the same size and time."""
    return {name: file for name, file in there.items() if not _same(here / name, file)}


def fetch(remote: Remote, folder: str, wanted: Mapping[str, RemoteFile], here: Path) -> int:
    """Copy files from a node to this machine.

    Args:
        remote: the node.
        folder: their folder there, an absolute path.
        wanted: the files, by their names relative to ``folder``.
        here: the folder to write them to, under the same names.

    Returns:
        The number of bytes received.

    Raises:
        UnrequestedFile: the node sent something that was not requested.
        UsageError: this machine cannot write them, or has not enough space.
        ClusterctlError: some files did not arrive.
    """
    if not wanted:
        return 0
    receiver = _Receiver(wanted, here, remote.node.name)
    script = render("run/send_files.sh.j2", folder=folder)
    with _space(receiver, here):
        try:
            receiver.start()
            result = remote.run(script, stdin=_names(wanted), on_line=receiver.line)
        finally:
            receiver.finish()
    if receiver.failure:
        raise receiver.failure
    if missing := sorted(set(wanted) - receiver.got):
        why = result.err.strip().splitlines()[0] if result.err.strip() else "it did not send them"
        raise ClusterctlError(f"{len(missing)} of {len(wanted)} files did not arrive, such as {missing[0]}: {why}")
    return receiver.bytes


def _names(wanted: Iterable[str]) -> Iterator[bytes]:
    for name in wanted:
        yield f"./{name}".encode("utf-8", "surrogateescape") + b"\0"


def _same(path: Path, file: RemoteFile) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return (found.st_size, int(found.st_mtime)) == (file.size, file.mtime)


_LOCK = threading.Lock()
RUNNING: list[_Receiver] = []


@contextlib.contextmanager
def _space(receiver: _Receiver, here: Path) -> Iterator[None]:
    """Reserve space for a fetch, in addition to the running fetches.

    Raises:
        UsageError: there is not enough.
    """
    folder = next(each for each in (here, *here.parents) if each.exists())
    with _LOCK:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        promised = sum(max(0, each.need - each.bytes) for each in RUNNING)
        if receiver.need + promised + _MARGIN > free:
            raise UsageError(
                f"{folder}: {text.size(receiver.need + promised)} are needed, and {text.size(free)} are free",
                hint="free some space, or name a folder on another disk with --to",
            )
        RUNNING.append(receiver)
    try:
        yield
    finally:
        with _LOCK:
            RUNNING.remove(receiver)


def _size(path: Path) -> int:
    """A file's size here; 0 if it does not exist."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class _Receiver(threading.Thread):
    """Unpacks the received tar in a separate thread, which reads it from a pipe."""

    def __init__(self, wanted: Mapping[str, RemoteFile], here: Path, node: str) -> None:
        super().__init__(name=f"fetch-{node}", daemon=True)
        self.got: set[str] = set()
        self.bytes = 0
        self.failure: ClusterctlError | None = None
        self._wanted, self._here, self._node = wanted, here, node
        self.need = sum(file.size - _size(here / name) for name, file in wanted.items())
        self._grown = 0
        self._reader, self._writer = os.pipe()
        self._open = True

    def line(self, text: str) -> None:
        """Take a line of base64."""
        try:
            data = memoryview(base64.b64decode(text, validate=True))
            while data:
                data = data[os.write(self._writer, data) :]
        except binascii.Error as error:
            raise ClusterctlError(f"{self._node}: the received data are damaged: {error}") from error
        except BrokenPipeError:
            raise self.failure or ClusterctlError(f"{self._node}: it sent more than was requested") from None

    def finish(self) -> None:
        """End the input and wait until the received files are written."""
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
                self.failure = ClusterctlError(f"{self._node}: the received data are incomplete or damaged: {error}")
        except (ValueError, OverflowError) as error:  # an invalid time or name
            self.failure = ClusterctlError(f"{self._node}: the received data cannot be unpacked: {error}")
        except OSError as error:
            self.failure = UsageError(f"cannot write {error.filename or self._here}: {error.strerror or error}")

    def _take(self, archive: TarReader, member: Member) -> None:
        name = member.name.removeprefix("./")
        if name not in self._wanted or member.kind not in ("file", "hard"):
            raise UnrequestedFile(f"{self._node}: it sent {member.name!r}, which was not requested; the fetch stopped")
        if name in self.got:
            raise UnrequestedFile(f"{self._node}: it sent {member.name!r} twice; the fetch stopped")
        path = self._here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + _PART)
        try:
            if member.kind == "hard":  # a second name of a file that was received
                target = member.target.removeprefix("./")
                if target not in self.got:
                    raise UnrequestedFile(f"{self._node}: it sent a link to {member.target!r}, which was not requested")
                with (self._here / target).open("rb") as source:
                    self._write(part, iter(lambda: source.read(_PIECE), b""), self._wanted[name].size)
            else:
                self._write(part, archive.content(), self._wanted[name].size)
            os.utime(part, (member.mtime, member.mtime))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        self.got.add(name)

    def _write(self, part: Path, pieces: Iterable[bytes], listed: int) -> None:
        """Write a file's first ``listed`` bytes; later ones are dropped."""
        left = listed
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece[:left])
                kept = min(left, len(piece))
                left -= kept
                self.bytes += kept
                self._grown += len(piece) - kept
                if self._grown > GROWN:
                    raise UnrequestedFile(f"{self._node}: it sent more than it had listed; the fetch stopped")
