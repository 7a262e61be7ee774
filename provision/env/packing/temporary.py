"""Files and folders with a temporary name until they are complete.

The writer holds a lock on the first file that it creates (flock; the system releases it when the process ends). The
next process that writes the same name recognises the files of a killed one and deletes them.
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
def create_file(out: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file that gets its name when it is complete, and is deleted otherwise.

    Args:
        out: the file.
        mode: its permissions, limited by the umask.

    Raises:
        UsageError: the folder is not writable, or its disk is full.
    """
    with explain_errors(out):
        path, opened = begin(out, mode=mode)
    try:
        with explain_errors(out), opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            path.replace(out)
    finally:
        with suppress(OSError):
            path.unlink()


@contextmanager
def create_folder_beside(out: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as ``out``; it is deleted at the end.

    Raises:
        UsageError: it cannot be created, or the disk is full.
    """
    delete_abandoned(out)
    folder = temporary_name(out)
    with explain_errors(out):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        with explain_errors(out):
            yield folder
    finally:
        delete_folder(folder)
        os.close(descriptor)


def begin(out: Path, suffix: str = "", *, mode: int = 0o666) -> tuple[Path, BinaryIO]:
    """Delete the files of killed writers of ``out``, and create a new file next to it that is locked while open.

    Raises:
        OSError: it cannot be created.
    """
    delete_abandoned(out)
    while True:
        path = temporary_name(out, suffix)
        opener = partial(os.open, mode=mode)
        file = open(path, "x+b", buffering=_BLOCK, opener=opener)  # noqa: SIM115 - closed by the caller
        lock(file.fileno())
        if path.exists():  # another writer may have deleted it before it was locked
            return path, file
        file.close()


def temporary_name(out: Path, suffix: str = "") -> Path:
    """An unused name in the same folder."""
    return out.parent / f".{secrets.token_hex(4)}-{out.name}{suffix}"


def delete_abandoned(out: Path) -> None:
    """Delete what killed writers of ``out`` left: files with temporary names that no process has locked."""
    name = re.compile(rf"(\.[0-9a-f]{{8}}-){re.escape(out.name)}(\.\d+|\.sha256)?", re.DOTALL)
    found: defaultdict[str, list[Path]] = defaultdict(list)
    with suppress(OSError):
        for path in out.parent.iterdir():
            if match := name.fullmatch(path.name):
                found[match[1]].append(path)
    for paths in found.values():
        _delete_unlocked(sorted(paths))


@contextmanager
def explain_errors(out: Path) -> Iterator[None]:
    """Turn errors about ``out`` into errors with a hint. Errors about other files are not changed.

    Raises:
        UsageError: the folder is not writable, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise disk_full(out, error) from error
        if error.errno == errno.EFBIG:
            raise UsageError(
                f"cannot write {out}: its file system does not support files of this size",
                hint="write to another disk, or write a bundle in parts: --split 4000M",
            ) from error
        if error.filename is None or out.name in Path(str(error.filename)).name:
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
        raise


def disk_full(out: Path, error: OSError) -> UsageError:
    """The error for a full disk or an exceeded quota."""
    status = os.statvfs(out.parent)
    free = f"{status.f_bavail * status.f_frsize / 1e9:.2f} GB free in {out.parent}"
    why = "your disk quota is used up" if error.errno == errno.EDQUOT else free
    return UsageError(f"no space left for {out}: {why}", hint="free some space, or write to another disk")


def delete_folder(folder: Path) -> None:
    """Delete a folder with everything in it, whatever the permissions inside."""
    for inside, _, _ in os.walk(folder):
        mode = stat.S_IMODE(os.lstat(inside).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            Path(inside).chmod(mode | stat.S_IRWXU)
    shutil.rmtree(folder)


def lock(descriptor: int) -> None:
    """Lock a file or folder until it is closed."""
    with suppress(OSError):  # without lock support, ``_delete_unlocked`` deletes nothing either
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _delete_unlocked(paths: list[Path]) -> None:
    """Delete the files of one writer, unless it is running: it locks the first path."""
    first = paths[0]
    with suppress(OSError):
        is_folder = first.is_dir() and not first.is_symlink()
        flags = os.O_RDONLY if is_folder else os.O_RDWR  # NFS locks only files open for writing
        descriptor = os.open(first, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in paths:
                delete_folder(path) if is_folder else path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
