"""Read a file of the environment once, and notice when it is not the file that was surveyed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from provision.env.scan import Found
from provision.errors import BundleError, UsageError

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
    except PermissionError as error:
        raise UsageError(
            f"cannot read {found.source}: permission denied",
            hint="ask its owner for read permission, or pack as a user who has it",
        ) from error
    except OSError as error:
        raise changed(found) from error
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


def changed(found: Found) -> BundleError:
    """The error for a file that is not what it was."""
    return BundleError(
        f"{found.source} changed while it was packed",
        hint="pack again when nothing writes to the environment",
    )
