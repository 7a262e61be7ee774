"""Files of a checkpoint from node to node, over a connection on which both sides have proved who they are.

::

    asker   {"get": "checkpoint-20/model.safetensors", "size": 123}
    giver   {"size": 123, "mtime": 1700000000000000000}  and 123 bytes in pieces  and {"end": true}
        or  {"error": why}

Each of these is a frame with a MAC (see ``frames.py``), also every piece of the file: a byte that another host changed
ends the connection before it is written.

A name is relative to the shared folder, and every part of it below that folder must be what it looks like: no ``..``,
no symlink, on either side. A file is written beside its place under a temporary name, and renamed when all of its bytes
have come, so that a file of that name is always whole.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import stat
from typing import Any, Callable, Dict, List, Optional, Sequence

from link.peer import whole
from link.stream import LINE, PIECE, SILENCE, CopyError, Stream

TEMPORARY = ".clusterctl-copy-"  # begins the name of a file that is being written

NAME = 4096  # bytes of a file's name

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(name: Any) -> List[str]:
    """The parts of a relative name.

    Raises:
        CopyError: it leads, or might lead, out of the folder.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or len(name) > NAME or any(part in {"", ".", ".."} or "\0" in part for part in parts):
        raise CopyError("%.200r is not the name of a file below the folder" % (name,))
    return parts


def _open_folder(folder: str, parts: Sequence[str], make: bool) -> int:
    """A descriptor of a folder below ``folder``; no part may be a symlink."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            below = os.open(part, _FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


def serve(stream: Stream, folder: Optional[str]) -> None:
    """Answer what is asked for until the other side ends. Without a folder the answer is always no.

    Raises:
        CopyError: the connection broke, or a file changed while it was sent.
    """
    while True:
        asked = stream.hear()
        if asked is None:
            return
        try:
            fd = _open_file(folder, asked)
        except (CopyError, OSError, UnicodeError) as error:
            stream.say({"error": getattr(error, "strerror", None) or str(error)})
            continue
        with os.fdopen(fd, "rb", buffering=0) as file:
            _send(stream, file)


def _open_file(folder: Optional[str], asked: Dict[str, Any]) -> int:
    if folder is None:
        raise CopyError("no folder is shared there")
    parts = parts_of(asked.get("get"))
    above = _open_folder(folder, parts[:-1], make=False)
    try:
        fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size != asked.get("size"):
        os.close(fd)
        raise CopyError("it is not a file of %.40r bytes (it has %d)" % (asked.get("size"), found.st_size))
    return fd


def _send(stream: Stream, file: Any) -> None:
    found = os.fstat(file.fileno())
    stream.say({"size": found.st_size, "mtime": found.st_mtime_ns})
    piece = memoryview(bytearray(PIECE))
    left = found.st_size
    while left:
        count = file.readinto(piece[: min(left, PIECE)])
        if not count:
            raise CopyError("%s became shorter while it was sent" % file.name)
        stream.write(piece[:count])
        left -= count
    stream.say({"end": True})


def receive(stream: Stream, folder: str, name: str, size: int, label: str, told: Callable[[int], None]) -> None:
    """Ask for one file and put it in its place. ``told`` is called with the bytes of each piece that has come.

    ``label`` makes the temporary name this node's own, as nodes may share the folder.

    Raises:
        CopyError: it did not come whole; then nothing has changed.
        OSError: it could not be written.
    """
    parts = parts_of(name)
    stream.say({"get": name, "size": size})
    answer = stream.hear()
    if answer is None:
        raise CopyError("%s: the other side closed the connection" % name)
    if answer.get("size") != size:
        raise CopyError("%s: %s" % (name, str(answer.get("error", "it is not %d bytes there" % size))[:1000]))
    mtime = whole(answer.get("mtime", 0))
    if mtime is None:
        raise CopyError("%s: the other side sent no modification time" % name)
    above = _open_folder(folder, parts[:-1], make=True)
    temporary = TEMPORARY + label
    try:
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=above
        )
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                _write(stream, file, name, size, told)
                os.fsync(fd)
                os.utime(fd, ns=(mtime, mtime))
            os.rename(temporary, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=above)
            raise
    finally:
        os.close(above)


def _write(stream: Stream, file: Any, name: str, size: int, told: Callable[[int], None]) -> None:
    piece = memoryview(bytearray(PIECE))
    left = size
    while left:
        count = stream.read(piece[: min(left, PIECE)])
        if not count:
            raise CopyError("%s: the other side closed the connection with %d bytes missing" % (name, left))
        data = piece[:count]
        while data:
            data = data[file.write(data) :]
        left -= count
        told(count)
    end = stream.hear()
    if end is None or end.get("end") is not True:
        raise CopyError("%s: the other side did not confirm the end of the file" % name)


def pump(one: Stream, other: Stream) -> None:
    """Carry frames between two connections, both ways, until one of them ends.

    Raises:
        CopyError: one of them broke, or nothing came for ``SILENCE`` seconds.
    """
    piece = memoryview(bytearray(max(PIECE, LINE)))
    with selectors.DefaultSelector() as selector:
        selector.register(one.sock, selectors.EVENT_READ, (one, other))
        selector.register(other.sock, selectors.EVENT_READ, (other, one))
        while True:
            ready = selector.select(SILENCE)
            if not ready:
                raise CopyError("no data arrived for %d s" % SILENCE)
            for key, _ in ready:
                source, target = key.data
                count = source.read(piece)
                if count is None:
                    return
                target.write(piece[:count])
