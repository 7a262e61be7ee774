"""Files of a node come to this machine: only those that are not here yet, and never to another place than they should.

A file that is here with the same size and time is not sent again, so that a fetch that broke off goes on where it was.
What comes is written beside its place and moved there in one rename. Names come from the node and are believed
nothing: an entry that was not asked for, that comes twice, or that is anything but a plain file, ends the fetch.

A node cannot take more of this machine's disk than its list says. The listed sizes of all fetches that are running are
compared with the free space first, and of each file no more bytes are kept than were listed: a log may have grown.
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

from provision.env.bundle.tar import Member, TarError, TarReader
from provision.env.report import text
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
_NO_LIST = 9  # the script's exit status
_GROWN = 64 << 20  # bytes by which a node's files may have grown since it listed them
_MARGIN = 16 << 20  # bytes that stay free


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
        ClusterctlError: the node has no program that lists files with their sizes.
    """
    script = render("run/list_files.sh.j2", folder=folder)
    result = remote.run(script, deadline=_LIST_DEADLINE)
    if result.rc == _NO_LIST:
        raise ClusterctlError(f"{remote.node.name}: the files in {folder} cannot be listed: {result.err.strip()}")
    with reading(remote.node):
        return parse_list(result.out, remote.node.name)


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
        UsageError: this machine cannot write them, or has not enough space.
        ClusterctlError: not all of them came.
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


_LOCK = threading.Lock()
_RUNNING: list[_Receiver] = []


@contextlib.contextmanager
def _space(receiver: _Receiver, here: Path) -> Iterator[None]:
    """Keep room for what a fetch will write, beside what the fetches that are running will still write.

    Raises:
        UsageError: there is not enough.
    """
    folder = next(each for each in (here, *here.parents) if each.exists())
    with _LOCK:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        promised = sum(max(0, each.need - each.bytes) for each in _RUNNING)
        if receiver.need + promised + _MARGIN > free:
            raise UsageError(
                f"{folder}: {text.size(receiver.need + promised)} will come, and {text.size(free)} are free",
                hint="free some space, or name a folder on another disk with --to",
            )
        _RUNNING.append(receiver)
    try:
        yield
    finally:
        with _LOCK:
            _RUNNING.remove(receiver)


def _size(path: Path) -> int:
    """Bytes of a file here; 0 where there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class _Receiver(threading.Thread):
    """Unpacks the received tar in a separate thread, which reads it from a pipe."""

    def __init__(self, wanted: Mapping[str, There], here: Path, node: str) -> None:
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
        if name in self.got:
            raise Escape(f"{self._node}: it sent {member.name!r} twice; the fetch was ended")
        path = self._here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + _PART)
        try:
            if member.kind == "hard":  # a second name of a file that has come already
                target = member.target.removeprefix("./")
                if target not in self.got:
                    raise Escape(f"{self._node}: it sent a link to {member.target!r}, which was not asked for")
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
        """Write a file's first ``listed`` bytes; what has been added since is dropped."""
        left = listed
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece[:left])
                kept = min(left, len(piece))
                left -= kept
                self.bytes += kept
                self._grown += len(piece) - kept
                if self._grown > _GROWN:
                    raise Escape(f"{self._node}: it sent more than it had listed; the fetch was ended")
