"""Moves the files of a folder in RAM to the disk, so that at any time one of the two has all of each file.

A file on the disk appears under its name only when all of it is there, and a link may then replace the one in RAM.
Names are relative to the folder, with ``/`` between their parts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Tuple
from urllib.parse import quote

from ..checkpoints.names import COPIES
from ..checkpoints.places import Found, find
from ..contract.plan import FROM_MEMORY
from ..link.copies import TEMPORARY

MARK = ".clusterctl"  # a file in the folder in RAM: without it the folder was deleted, and means nothing
JOIN = FROM_MEMORY  # seconds for the copy of a file that has begun, and for all that is left at the end
PIECE = 1 << 20
_SETSIG = getattr(fcntl, "F_SETSIG", 10)

Signs = Tuple[int, int]  # size and modification time


def to_drain(files: Mapping[str, Signs], before: Mapping[str, Signs], last: Iterable[str] = ()) -> List[str]:
    """The files that are as they were at the last look: the last written one last, and those in ``last`` after it."""
    after = set(last)
    quiet = [name for name, signs in files.items() if before.get(name) == signs]
    return sorted(quiet, key=lambda name: (name in after, files[name][1], name))


def empty(
    folder: Path,
    disk: Path,
    node: str,
    copied: Optional[Mapping[str, Signs]] = None,
    until: Optional[float] = None,
) -> None:
    """Move all files that are only in RAM to the disk, the last written one last, and remove the folder.

    Args:
        folder: the folder in RAM.
        disk: the output folder.
        node: this node's name.
        copied: the files that the disk has; None: not known, and then a file on the disk that is newer stays.
        until: the time at which this ends with an error.

    Raises:
        OSError: the disk refuses; the rest stays in RAM.
    """
    files = signs_of(folder, [name for name in files_below(folder, strict=True) if name != MARK])
    for name in to_drain(files, files):
        if (copied or {}).get(name) != files[name]:
            copy_file(folder / name, disk / name, node, keep_newer=copied is None, until=until)
    mirror_links(disk, find(folder))
    shutil.rmtree(folder)


def follow_renames(folder: Path, disk: Path) -> None:
    """Rename on the disk what the program renamed in RAM: a link there still names the old place.

    Programs that save to ``tmp-checkpoint-20`` and rename it do this.

    Raises:
        OSError: the disk refuses.
    """
    start = str(disk) + "/"
    for name in files_below(folder, links=True):
        path = folder / name
        try:
            target = os.readlink(path)  # noqa: PTH115 - text, compared with names
        except OSError:
            continue
        old = target[len(start) :] if target.startswith(start) else name
        if old == name or sign_of(disk / old) is None:
            continue
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder / old):  # the program copied the link
            shutil.copy2(disk / old, disk / name)
        else:
            (disk / old).replace(disk / name)
        with contextlib.suppress(FileNotFoundError):
            replace_by_link(path, disk / name)


def mirror_links(disk: Path, found: Found) -> None:
    """Let links on the disk name the checkpoints that those in RAM name, if the disk has them."""
    for one in found.pointers:
        path = disk / one.name
        if one.link and os.path.lexists(path.parent / one.tag):
            with contextlib.suppress(OSError):  # a folder of that name is in the way
                if not path.is_symlink() or os.readlink(path) != one.tag:  # noqa: PTH115
                    replace_by_link(path, Path(one.tag))


def is_written(path: Path) -> bool:
    """Whether a process has the file open for writing: it may pause for longer than a look. False if it is not known.

    The kernel grants a lease on a file only if it is not open for writing (fcntl(2)). The lease ends at once.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, _SETSIG, signal.SIGURG)  # for a program that opens it meanwhile; SIGURG is ignored
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(fd)
    return False


def _temporary(node: str) -> str:
    return "%smemory-%s-" % (TEMPORARY, quote(node, safe=""))


def remove_temporaries(disk: Path, node: str) -> None:
    """Remove the unfinished files of an agent of this node that was killed. Other nodes may share the folder."""
    for folder, folders, names in os.walk(disk):
        folders[:] = [name for name in folders if name != COPIES]
        for name in names:
            if name.startswith(_temporary(node)):
                (Path(folder) / name).unlink()


def _check_time(until: Optional[float], target: Path) -> None:
    if until is not None and time.monotonic() > until:
        raise OSError(errno.ETIMEDOUT, "it is not written after %d s" % JOIN, str(target))


def copy_file(
    source: Path, target: Path, node: str, *, keep_newer: bool = False, until: Optional[float] = None
) -> bool:
    """Copy a file to the disk under a temporary name, and rename it when all of it is there.

    False if it was written meanwhile: then the disk is as before. ``keep_newer``: what an earlier attempt left in RAM
    replaces nothing newer.
    """
    found, there = source.stat(), sign_of(target)
    signs = (found.st_size, found.st_mtime_ns)
    if there is not None and (there == signs or (keep_newer and there[1] > found.st_mtime_ns)):
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / (_temporary(node) + secrets.token_hex(4))  # nodes may share the folder
    try:
        with source.open("rb", buffering=0) as file, temporary.open("wb") as out:
            for piece in iter(lambda: file.read(PIECE), b""):
                out.write(piece)
                _check_time(until, target)
            out.flush()
            os.fchmod(out.fileno(), stat.S_IMODE(found.st_mode))
            os.fsync(out.fileno())
        os.utime(temporary, ns=(found.st_mtime_ns, found.st_mtime_ns))
        whole = sign_of(source) == signs
        if whole:
            temporary.replace(target)
            return True
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    temporary.unlink()
    return False


def replace_by_link(path: Path, target: Path) -> None:
    """Let a file in RAM be a link to its copy, in one rename."""
    link = path.parent / (TEMPORARY + "link")
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(target)
    link.replace(path)


def files_below(folder: Path, below: str = "", *, links: bool = False, strict: bool = False) -> List[str]:
    """The regular files below a folder, or its links, without those that are still being copied.

    ``strict``: a folder that cannot be read is an error.
    """
    found: List[str] = []
    try:
        with os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found += files_below(folder, below + entry.name + "/", links=links, strict=strict)
                elif entry.name.startswith(TEMPORARY):
                    continue
                elif entry.is_symlink() if links else entry.is_file(follow_symlinks=False):
                    found.append(below + entry.name)
    except OSError:
        if strict:
            raise
    return found


def sign_of(path: Path) -> Optional[Signs]:
    """Size and time of a regular file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def signs_of(folder: Path, names: Iterable[str]) -> Dict[str, Signs]:
    """Sizes and times of the regular files among these names of a folder."""
    found = ((name, sign_of(folder / name)) for name in names)
    return {name: signs for name, signs in found if signs is not None}
