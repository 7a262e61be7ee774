"""Files that appear when they are whole, and folders that go when they are done with."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from provision.errors import UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def created(out: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when everything is written; nothing stays behind otherwise.

    Raises:
        UsageError: the folder cannot be written to, or its disk is full.
    """
    temporary = beside(out)
    try:
        with temporary.open("xb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    except OSError as error:
        if error.errno in _FULL:
            raise full(out, out.parent) from error
        if error.filename == str(temporary):
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
        raise
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """A folder on the same disk as ``out``; it goes with everything in it.

    Raises:
        UsageError: it cannot be made, or the disk is full.
    """
    folder = beside(out)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot write in {out.parent}: {error.strerror}") from error
    try:
        yield folder
    except OSError as error:
        if error.errno in _FULL:
            raise full(out, out.parent) from error
        raise
    finally:
        remove(folder)


def beside(out: Path) -> Path:
    """A name in the same folder that nobody else uses."""
    return out.parent / f".{secrets.token_hex(4)}-{out.name}"


def full(out: Path, folder: Path) -> UsageError:
    """The error for a disk without space."""
    status = os.statvfs(folder)
    free = f"{status.f_bavail * status.f_frsize / 1e9:.2f} GB"
    return UsageError(f"no space left for {out}: {free} free in {folder}", hint="free some space, or write elsewhere")


def remove(folder: Path) -> None:
    """Remove a folder, whatever the permissions of what lies in it."""
    for inside, _, _ in os.walk(folder):
        mode = stat.S_IMODE(os.lstat(inside).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            Path(inside).chmod(mode | stat.S_IRWXU)
    shutil.rmtree(folder)
