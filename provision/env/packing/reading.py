"""Read files of an environment, and detect files that changed since the survey."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from provision.env.source.scan import Source
from provision.errors import BundleError, ClusterctlError, UsageError

_BLOCK = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_source(source: Source) -> Iterator[int]:
    """Open a file and yield its descriptor. At the end, compare its size and mtime with the survey's.

    Raises:
        BundleError: the file changed or was deleted.
        UsageError: it cannot be read.
    """
    descriptor = _open(source)
    try:
        yield descriptor
        _check_unchanged(descriptor, source)
    finally:
        os.close(descriptor)


def read_source(source: Source) -> bytes:
    """Read a whole file; errors as for ``open_source``."""
    with open_source(source) as descriptor:
        return read_at(descriptor, 0, source.size, source)


def read_into(view: memoryview, source: Source) -> None:
    """Read a whole file into ``view``, which has its size; errors as for ``open_source``."""
    descriptor = _open(source)  # not ``open_source``: a generator for each of many small files takes time
    try:
        if view:
            fill(view, descriptor, 0, source)
        _check_unchanged(descriptor, source)
    finally:
        os.close(descriptor)


def fill(view: memoryview, descriptor: int, offset: int, source: Source) -> None:
    """Fill ``view`` with a file's bytes from ``offset``.

    Raises:
        BundleError: the file became shorter.
        UsageError: it cannot be read.
    """
    size = len(view)
    done = 0
    try:
        while done < size:
            count = os.preadv(descriptor, [view[done:] if done else view], offset + done)
            if not count:
                raise source_changed(source)
            done += count
    except OSError as error:
        if error.errno in (errno.ESPIPE, errno.EISDIR):  # it was replaced by a pipe or a folder
            raise source_changed(source) from error
        raise UsageError(f"cannot read {source.file}: {error.strerror}") from error


def read_at(descriptor: int, offset: int, size: int, source: Source) -> bytes:
    """Read exactly ``size`` bytes from ``offset``; errors as for ``fill``."""
    data = bytearray(max(0, size))
    with memoryview(data) as view:
        fill(view, descriptor, offset, source)
    return bytes(data)


def read_again(source: Source, digest: str) -> Iterator[bytes]:
    """Read a file whose sha256 is known in blocks; errors as for ``open_source``."""
    now = hashlib.sha256()
    with open_source(source) as descriptor:
        for offset in range(0, source.size, _BLOCK):
            block = read_at(descriptor, offset, min(_BLOCK, source.size - offset), source)
            now.update(block)
            yield block
    if now.hexdigest() != digest:
        raise source_changed(source)


def source_changed(source: Source) -> BundleError:
    """The error for a file that changed since the survey."""
    return BundleError(
        f"{source.file} changed while it was read", hint="stop what writes to it, then run the same command again"
    )


def _open(source: Source) -> int:
    try:
        return os.open(source.file, _FLAGS)
    except OSError as error:
        raise _failure(source, error) from error


def _check_unchanged(descriptor: int, source: Source) -> None:
    status = os.fstat(descriptor)
    if status.st_mtime_ns != source.mtime_ns or status.st_size != source.size:
        raise source_changed(source)


def _failure(source: Source, error: OSError) -> ClusterctlError:
    if isinstance(error, PermissionError):
        return UsageError(
            f"cannot read {source.file}: permission denied",
            hint="ask its owner for read permission, or pack as a user who has it",
        )
    return source_changed(source)
