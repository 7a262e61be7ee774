"""Read a file of the environment once, and notice when it is not the file that was surveyed."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from provision.env.source.scan import Found
from provision.errors import BundleError, ClusterctlError, UsageError

_BLOCK = 1 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def opened(found: Found) -> Iterator[int]:
    """A descriptor of a file; on leaving, its size and time are compared with what the survey saw.

    Raises:
        BundleError: the file changed, or is gone.
        UsageError: it cannot be read.
    """
    try:
        descriptor = os.open(found.source, _FLAGS)
    except OSError as error:
        raise _failure(found, error) from error
    try:
        yield descriptor
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (found.size, found.mtime_ns):
            raise changed(found)
    finally:
        os.close(descriptor)


def read(found: Found) -> bytes:
    """The whole content of a file.

    Raises:
        BundleError: the file changed, or is gone.
        UsageError: it cannot be read.
    """
    with opened(found) as descriptor:
        return read_at(descriptor, 0, found.size, found)


def read_into(view: memoryview, found: Found) -> None:
    """Fill ``view``, which is as long as the file, with its content.

    Raises:
        BundleError: the file changed, or is gone.
        UsageError: it cannot be read.
    """
    try:  # not ``opened``: with many small files a generator for each of them takes its time
        descriptor = os.open(found.source, _FLAGS)
    except OSError as error:
        raise _failure(found, error) from error
    try:
        if view:
            fill(view, descriptor, 0, found)
        status = os.fstat(descriptor)
        if status.st_mtime_ns != found.mtime_ns or status.st_size != found.size:
            raise changed(found)
    finally:
        os.close(descriptor)


def fill(view: memoryview, descriptor: int, offset: int, found: Found) -> None:
    """Fill ``view`` with a file's bytes from ``offset``.

    Raises:
        BundleError: the file has become shorter.
        UsageError: the disk does not give them.
    """
    size = len(view)
    done = 0
    try:
        while done < size:
            count = os.preadv(descriptor, [view[done:] if done else view], offset + done)
            if not count:
                raise changed(found)
            done += count
    except OSError as error:
        if error.errno in (errno.ESPIPE, errno.EISDIR):  # a pipe or a folder has taken its place
            raise changed(found) from error
        raise UsageError(f"cannot read {found.source}: {error.strerror}") from error


def read_at(descriptor: int, offset: int, size: int, found: Found) -> bytes:
    """Exactly ``size`` bytes from ``offset``.

    Raises:
        BundleError: the file has become shorter.
        UsageError: the disk does not give them.
    """
    blocks = []
    try:
        while size > 0:
            block = os.pread(descriptor, size, offset)
            if not block:
                raise changed(found)
            blocks.append(block)
            offset += len(block)
            size -= len(block)
    except OSError as error:
        raise UsageError(f"cannot read {found.source}: {error.strerror}") from error
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def again(found: Found, digest: str) -> Iterator[bytes]:
    """A file that was read before, and had this sha256 then, in blocks.

    Raises:
        BundleError: it changed.
        UsageError: it cannot be read.
    """
    now = hashlib.sha256()
    with opened(found) as descriptor:
        for offset in range(0, found.size, _BLOCK):
            block = read_at(descriptor, offset, min(_BLOCK, found.size - offset), found)
            now.update(block)
            yield block
    if now.hexdigest() != digest:
        raise changed(found)


def changed(found: Found) -> BundleError:
    """The error for a file that is not what it was."""
    return BundleError(
        f"{found.source} changed while it was packed",
        hint="pack again when nothing writes to the environment",
    )


def _failure(found: Found, error: OSError) -> ClusterctlError:
    if isinstance(error, PermissionError):
        return UsageError(
            f"cannot read {found.source}: permission denied",
            hint="ask its owner for read permission, or pack as a user who has it",
        )
    return changed(found)
