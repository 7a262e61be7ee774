"""What is written appears under its name when it is whole, and has a temporary one beside it until then.

Whoever writes holds a lock on the first file that it has made (flock, which the system lets go when the process ends,
however that is). So the next one to write the same name knows what a killed one has left, and removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from provision.errors import UsageError

FULL = (errno.ENOSPC, errno.EDQUOT)

_BLOCK = 1 << 20


@contextmanager
def created(out: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that gets its name when everything is written; nothing stays behind otherwise.

    Args:
        out: the file.
        mode: its permissions, as far as the umask leaves them.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    with explained(out):
        path, opened = begin(out, mode=mode)
    try:
        with explained(out), opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            path.replace(out)
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A folder on the same disk as ``out``; it goes with everything in it.

    Raises:
        UsageError: it cannot be made, or the disk is full.
    """
    sweep(out)
    folder = beside(out)
    with explained(out):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        with explained(out):
            yield folder
    finally:
        remove(folder)
        os.close(descriptor)


def begin(out: Path, suffix: str = "", *, mode: int = 0o666) -> tuple[Path, BinaryIO]:
    """Remove what killed runs have left of ``out``, and make a new file beside it; locked while it is open.

    Raises:
        OSError: it cannot be made.
    """
    sweep(out)
    while True:
        path = beside(out, suffix)
        opener = partial(os.open, mode=mode)
        file = open(path, "x+b", buffering=_BLOCK, opener=opener)  # noqa: SIM115 - closed by the caller
        _lock(file.fileno())
        if path.exists():  # nobody has swept it away in the moment in which it was not locked
            return path, file
        file.close()


def beside(out: Path, suffix: str = "") -> Path:
    """A name in the same folder that nobody else uses."""
    return out.parent / f".{secrets.token_hex(4)}-{out.name}{suffix}"


def sweep(out: Path) -> None:
    """Remove what killed runs have left of ``out``: all that ``beside`` has named, and nobody has locked."""
    name = re.compile(rf"(\.[0-9a-f]{{8}}-){re.escape(out.name)}(\.\d+|\.sha256)?", re.DOTALL)
    found: defaultdict[str, list[Path]] = defaultdict(list)
    with suppress(OSError):
        for path in out.parent.iterdir():
            if match := name.fullmatch(path.name):
                found[match[1]].append(path)
    for paths in found.values():
        _remove_abandoned(sorted(paths))


@contextmanager
def explained(out: Path) -> Iterator[None]:
    """Say what a person can do where ``out`` cannot be written; an error about another file stays what it is.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(out, error) from error
        if error.errno == errno.EFBIG:
            raise UsageError(
                f"cannot write {out}: its file system has no files that are so large",
                hint="write it to another disk, or a bundle in parts: --split 4000M",
            ) from error
        if error.filename is None or out.name in Path(str(error.filename)).name:
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
        raise


def full(out: Path, error: OSError) -> UsageError:
    """The error for a disk without space, or without space for this user."""
    status = os.statvfs(out.parent)
    free = f"{status.f_bavail * status.f_frsize / 1e9:.2f} GB free in {out.parent}"
    why = "your disk quota is used up" if error.errno == errno.EDQUOT else free
    return UsageError(f"no space left for {out}: {why}", hint="free some space, or write to another disk")


def remove(folder: Path) -> None:
    """Remove a folder, whatever the permissions of what lies in it."""
    for inside, _, _ in os.walk(folder):
        mode = stat.S_IMODE(os.lstat(inside).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            Path(inside).chmod(mode | stat.S_IRWXU)
    shutil.rmtree(folder)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # where there are no locks, ``_remove_abandoned`` gets none either, and removes nothing
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _remove_abandoned(paths: list[Path]) -> None:
    """Remove what one run has made, unless it is at work: the first path is the one that it would have locked."""
    first = paths[0]
    with suppress(OSError):
        is_folder = first.is_dir() and not first.is_symlink()
        flags = os.O_RDONLY if is_folder else os.O_RDWR  # NFS locks only what is open for writing
        descriptor = os.open(first, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in paths:
                remove(path) if is_folder else path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
