"""Lets the program save to a folder in RAM, and moves what it saved to the disk while the training continues.

The program gets ``clusterctl-UID/RUN-RANK`` in ``/dev/shm`` as its output folder (``Copies.memory``), or in the file
system with huge pages where the service ``tmpfs`` is set up. A thread copies checkpoints from there into the output
folder on the disk: each file when it has been quiet for a look, the last written one last, so that a file that marks a
checkpoint as complete comes after the others. A file that a process has open for writing waits. A copied file in RAM
becomes a symlink to the disk. So RAM holds about one checkpoint, and the program can still read older ones. When it
deletes an old checkpoint (``save_total_limit``), the agent deletes it on the disk, once the disk has all newer ones.

The output folder on the disk is the only one that resuming, copying and collecting know. Its existing entries are links
in RAM, so a log continues in its file on the disk. When no process of the attempt is left, everything else is moved to
the disk, before the agents meet. If the agent was killed, its guard or the next agent of the run does so. A restart of
the node loses what was only in RAM.
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
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple
from urllib.parse import quote

from ..checkpoints.names import COPIES
from ..checkpoints.places import Found, find
from ..contract.plan import FROM_MEMORY, RAM
from ..link.copies import TEMPORARY, lower_priority
from ..run_files import NodePlan

SHM = Path("/dev/shm")  # noqa: S108 - tmpfs on every Linux; the folder in it is private
HUGE = Path(RAM)
MARK = ".clusterctl"  # a file in the folder in RAM: without it the folder was deleted, and means nothing
LOOK = 0.5  # seconds between looks
LEAST = 256 << 20  # bytes that RAM must have for a checkpoint whose size is not known yet
SPARE = 2  # checkpoints that must fit: one is written while another one is copied to the disk
USABLE = 0.5  # share of the available RAM that checkpoints may use; the ranks need the rest
JOIN = FROM_MEMORY  # seconds for the copy of a file that has begun, and for all that is left at the end
PIECE = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
_SETSIG = getattr(fcntl, "F_SETSIG", 10)

Signs = Tuple[int, int]  # size and modification time


class Ram(NamedTuple):
    """Bytes: free in the file system, and available in the machine."""

    free: int
    available: int


def why_not(ram: Ram, checkpoint: Optional[int], base: Path = SHM) -> Optional[str]:
    """Why RAM is too small for checkpoints of this size (None: not known) in the file system ``base``, or None."""
    needed = LEAST if checkpoint is None else SPARE * checkpoint
    if ram.free < needed:
        return "%s has %d MB free, but %d MB are needed; enlarge it: mount -o remount,size=%dM %s" % (
            base, ram.free >> 20, needed >> 20, (needed >> 20) * 2, base,
        )  # fmt: skip
    if ram.available * USABLE < needed:
        return "%d MB of RAM are available, but %d MB are needed" % (ram.available >> 20, int(needed / USABLE) >> 20)
    return None


def to_drain(files: Mapping[str, Signs], before: Mapping[str, Signs], last: Iterable[str] = ()) -> List[str]:
    """The files that are as they were at the last look: the last written one last, and those in ``last`` after it."""
    after = set(last)
    quiet = [name for name, signs in files.items() if before.get(name) == signs]
    return sorted(quiet, key=lambda name: (name in after, files[name][1], name))


def deleted(drained: Iterable[str], present: Iterable[str]) -> List[str]:
    """The checkpoints that the program deleted: they were in RAM, and nothing of them is left there."""
    return sorted(set(drained) - set(present))


def file_system() -> Path:
    """The file system in RAM for checkpoints."""
    return HUGE if os.path.ismount(str(HUGE)) else SHM


def folder_of(plan: NodePlan, base: Path) -> Path:
    """The folder in RAM of a run's node."""
    return base / ("clusterctl-%d" % os.geteuid()) / ("%s-%s" % (plan.run, plan.node.replace("/", "_")))


class Memory:
    """One attempt's folder in RAM. ``report(text)`` gets notices, in any thread."""

    def __init__(self, plan: NodePlan, report: Callable[[str], None], base: Optional[Path] = None) -> None:
        self._plan = plan
        self._report = report
        self._given = base
        self._base = base or file_system()
        self.folder = folder_of(plan, self._base)
        self._disk = plan.output
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._known: Dict[str, bool] = {}  # checkpoints that are or were in RAM, and whether each is a single file
        self._before: Dict[str, Signs] = {}
        self._copied: Dict[str, Signs] = {}  # files in RAM that the disk has; its own times may be coarser
        self._failed = False

    def prepare(self) -> Optional[Path]:
        """Make the folder and start the thread. None if the program must save to the disk; the reason is reported."""
        disk = self._disk
        if disk is None or self._plan.data.copies is None or not self._plan.data.copies.memory:
            return None
        from ..supervisor.attempt import make_private  # noqa: PLC0415 - it imports this module

        try:
            make_private(self.folder.parent)
            rescue(self._plan, self._given)  # what an earlier attempt left, if the disk was full
            disk.mkdir(parents=True, exist_ok=True)
            _remove_temporaries(disk, self._plan.node)
            why = _removed_at_logout() if self._base != HUGE else None
            why = why or why_not(_ram(self._base), _size_of_newest(disk), self._base)
            if why is None:
                if self.folder.exists():  # without a mark: it was deleted in part, and means nothing
                    shutil.rmtree(self.folder)
                make_private(self.folder)
                self._link_existing(disk)
                (self.folder / MARK).touch()
        except OSError as error:
            why = str(error)
            if not (self.folder / MARK).exists():
                shutil.rmtree(self.folder, ignore_errors=True)
        if why is not None:
            self._report("checkpoints are saved to the disk, because RAM cannot be used: %s" % why)
            return None
        self._thread = threading.Thread(target=self._drain_all, name="memory", daemon=True)
        self._thread.start()
        return self.folder

    def finish(self) -> Optional[str]:
        """Move everything to the disk, when no process of the attempt is left, and remove the folder.

        Returns why something stays in RAM, or None.
        """
        if self._thread is None:
            return None
        self._closed.set()
        self._thread.join(JOIN)
        assert self._disk is not None
        why = None
        if self._thread.is_alive():
            why = "a file is not written after %d s" % JOIN
        elif not (self.folder / MARK).exists():
            self._report("%s was deleted: what was only in RAM is lost. %s is unchanged" % (self.folder, self._disk))
        else:
            try:
                self._move(self._disk)
            except OSError as error:
                why = str(error)
        self._thread = None
        return why and "what was saved to RAM could not be moved to the disk (%s): free some space in %s, then: " % (
            why, self._disk,
        ) + "clusterctl resume %s" % self._plan.run  # fmt: skip

    def _move(self, disk: Path) -> None:
        """Move everything to the disk.

        Raises:
            OSError: the disk refuses; the rest stays in RAM.
        """
        follow_renames(self.folder, disk)
        gone, until = self._gone(find(self.folder)), time.monotonic() + JOIN
        try:
            empty(self.folder, disk, self._plan.node, self._copied, until)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._delete(disk, _all_but_newest(disk, gone))
            empty(self.folder, disk, self._plan.node, self._copied, until)
        self._delete(disk, gone)

    def _link_existing(self, disk: Path) -> None:
        """Let the folder show what the disk has. Checkpoints become folders of links, which a program can delete.

        A file that names a checkpoint is copied: written through a link, it would name one that is only in RAM.
        """
        found = find(disk)
        self._known.update((one.name, one.single) for one in found.checkpoints)
        folders = {one.name for one in found.checkpoints if not one.single}
        above = {str(parent) for one in found.checkpoints for parent in PurePosixPath(one.name).parents}
        pointers = {one.name for one in found.pointers if not one.link}
        self._show(disk, "", folders, above, pointers)

    def _show(self, disk: Path, below: str, folders: Set[str], above: Set[str], pointers: Set[str]) -> None:
        with os.scandir(disk / below) as entries:
            listed = list(entries)
        for entry in listed:
            name = below + entry.name
            target = self.folder / name
            if entry.name.startswith(TEMPORARY) or name == COPIES:
                continue
            if name in folders:
                for each in _names(disk / name):
                    (target / each).parent.mkdir(parents=True, exist_ok=True)
                    (target / each).symlink_to(disk / name / each)
            elif name in above and entry.is_dir(follow_symlinks=False):
                target.mkdir()
                self._show(disk, name + "/", folders, above, pointers)
            elif name in pointers:
                shutil.copy2(entry.path, target)
                self._copied.update(_signs(self.folder, [name]))
            else:
                target.symlink_to(entry.path)

    def _drain_all(self) -> None:
        lower_priority()
        while not self._closed.wait(LOOK):
            try:
                self._drain()
                self._failed = False
            except Exception as error:  # noqa: BLE001, PERF203 - a full disk: the files wait in RAM
                if not self._failed:
                    self._report("a checkpoint in RAM could not be copied to the disk: %s" % error)
                self._failed = True

    def _drain(self) -> None:
        """Copy what is quiet to the disk, and delete there what the program deleted."""
        disk = self._disk
        assert disk is not None
        follow_renames(self.folder, disk)
        found = find(self.folder)
        owners = {one.name: one.name for one in found.checkpoints if one.single}
        newest_of = list(owners)
        for one in found.checkpoints:
            if not one.single:
                owners.update((one.name + "/" + name, one.name) for name in _names(self.folder / one.name))
        pointers = {one.name for one in found.pointers if not one.link}
        files = _signs(self.folder, [*owners, *pointers])
        self._known.update((one.name, one.single) for one in found.checkpoints)
        newest = max(newest_of, key=lambda name: files.get(name, (0, 0))[1], default=None)
        quiet, self._before = to_drain(files, self._before, pointers), files
        gone = self._gone(found)
        try:
            for name in self._drained(disk, quiet, owners):
                if name not in pointers and name != newest:  # the program writes these again
                    self._replace(disk, name, files[name])
        except OSError as error:
            if error.errno in FULL:  # what the program deleted makes room, but one checkpoint stays
                self._delete(disk, _all_but_newest(disk, gone))
            raise
        self._copied = {name: signs for name, signs in self._copied.items() if name in files}
        if all(self._copied.get(name) == signs for name, signs in files.items()):
            _mirror_links(disk, found)
            self._delete(disk, gone)  # not before: the disk would have no checkpoint while the next one is copied

    def _drained(self, disk: Path, quiet: Iterable[str], owners: Mapping[str, str]) -> Iterator[str]:
        """Copy quiet files to the disk, and yield those that are there.

        If a file cannot be copied yet, the later ones of its checkpoint and what names a checkpoint must wait.
        """
        waiting: Set[str] = set()
        for name in quiet:
            signs = self._before[name]
            if owners.get(name) in waiting or (name not in owners and waiting):
                continue
            if self._copied.get(name) != signs:
                path = self.folder / name
                try:
                    whole = not is_written(path) and _copy(path, disk / name, self._plan.node)
                except FileNotFoundError:  # the program deleted or renamed it; the next look sees that
                    whole = False
                if not whole:
                    waiting.add(owners.get(name, name))
                    continue
                self._copied[name] = signs
            yield name

    def _replace(self, disk: Path, name: str, signs: Signs) -> None:
        """Let a file in RAM be a link to its copy, unless it was or is being written again."""
        path = self.folder / name
        with contextlib.suppress(OSError):
            if _sign(path) == signs and (disk / name).stat().st_size == signs[0] and not is_written(path):
                _replace_by_link(path, disk / name)

    def _gone(self, found: Found) -> List[str]:
        """The checkpoints that the program has deleted."""
        if not (self.folder / MARK).exists():  # another program deleted it: the disk has the only checkpoints
            return []
        links = [name for name in self._known if os.path.lexists(self.folder / name)]
        return deleted(self._known, [*links, *(one.name for one in found.checkpoints)])

    def _delete(self, disk: Path, names: Iterable[str]) -> None:
        for name in names:
            single = self._known.pop(name, None)
            if single:
                with contextlib.suppress(FileNotFoundError):
                    (disk / name).unlink()
            elif single is not None:
                shutil.rmtree(disk / name, ignore_errors=True)


def rescue(plan: NodePlan, base: Optional[Path] = None) -> bool:
    """Move to the disk what an agent that was killed left in RAM. True if there was anything.

    Raises:
        OSError: the disk refuses; the rest stays in RAM.
    """
    if plan.output is None or plan.data.copies is None:
        return False
    found = [
        folder for folder in (folder_of(plan, each) for each in ([base] if base else (HUGE, SHM))) if _ours(folder)
    ]
    for folder in found:
        follow_renames(folder, plan.output)
        empty(folder, plan.output, plan.node)
    return bool(found)


def _ours(folder: Path) -> bool:
    """Whether an agent of this user made the folder: another user may write to a file system in RAM."""
    for each in (folder.parent, folder):
        found = each.lstat() if os.path.lexists(str(each)) else None
        if found is None or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
    return (folder / MARK).exists()


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
    files = _signs(folder, [name for name in _names(folder, strict=True) if name != MARK])
    for name in to_drain(files, files):
        if (copied or {}).get(name) != files[name]:
            _copy(folder / name, disk / name, node, keep_newer=copied is None, until=until)
    _mirror_links(disk, find(folder))
    shutil.rmtree(folder)


def follow_renames(folder: Path, disk: Path) -> None:
    """Rename on the disk what the program renamed in RAM: a link there still names the old place.

    Programs that save to ``tmp-checkpoint-20`` and rename it do this.

    Raises:
        OSError: the disk refuses.
    """
    start = str(disk) + "/"
    for name in _names(folder, links=True):
        path = folder / name
        try:
            target = os.readlink(path)  # noqa: PTH115 - text, compared with names
        except OSError:
            continue
        old = target[len(start) :] if target.startswith(start) else name
        if old == name or _sign(disk / old) is None:
            continue
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder / old):  # the program copied the link
            shutil.copy2(disk / old, disk / name)
        else:
            (disk / old).replace(disk / name)
        with contextlib.suppress(FileNotFoundError):
            _replace_by_link(path, disk / name)


def _mirror_links(disk: Path, found: Found) -> None:
    """Let links on the disk name the checkpoints that those in RAM name, if the disk has them."""
    for one in found.pointers:
        path = disk / one.name
        if one.link and os.path.lexists(path.parent / one.tag):
            with contextlib.suppress(OSError):  # a folder of that name is in the way
                if not path.is_symlink() or os.readlink(path) != one.tag:  # noqa: PTH115
                    _replace_by_link(path, Path(one.tag))


def _all_but_newest(disk: Path, names: Iterable[str]) -> List[str]:
    """These checkpoints, without the newest one that the disk has."""
    dated = [(found.st_mtime_ns, one.name) for one in find(disk).checkpoints for found in [(disk / one.name).stat()]]
    newest = max(dated, default=(0, ""))[1]
    return [name for name in names if name != newest]


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


def _remove_temporaries(disk: Path, node: str) -> None:
    """Remove the unfinished files of an agent of this node that was killed. Other nodes may share the folder."""
    for folder, folders, names in os.walk(disk):
        folders[:] = [name for name in folders if name != COPIES]
        for name in names:
            if name.startswith(_temporary(node)):
                (Path(folder) / name).unlink()


def _check_time(until: Optional[float], target: Path) -> None:
    if until is not None and time.monotonic() > until:
        raise OSError(errno.ETIMEDOUT, "it is not written after %d s" % JOIN, str(target))


def _copy(source: Path, target: Path, node: str, *, keep_newer: bool = False, until: Optional[float] = None) -> bool:
    """Copy a file to the disk under a temporary name, and rename it when all of it is there.

    False if it was written meanwhile: then the disk is as before. ``keep_newer``: what an earlier attempt left in RAM
    replaces nothing newer.
    """
    found, there = source.stat(), _sign(target)
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
        whole = _sign(source) == signs
        if whole:
            temporary.replace(target)
            return True
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    temporary.unlink()
    return False


def _replace_by_link(path: Path, target: Path) -> None:
    """Let a file in RAM be a link to its copy, in one rename."""
    link = path.parent / (TEMPORARY + "link")
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(target)
    link.replace(path)


def _names(folder: Path, below: str = "", *, links: bool = False, strict: bool = False) -> List[str]:
    """The regular files below a folder, or its links, without those that are still being copied.

    ``strict``: a folder that cannot be read is an error.
    """
    found: List[str] = []
    try:
        with os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    found += _names(folder, below + entry.name + "/", links=links, strict=strict)
                elif entry.name.startswith(TEMPORARY):
                    continue
                elif entry.is_symlink() if links else entry.is_file(follow_symlinks=False):
                    found.append(below + entry.name)
    except OSError:
        if strict:
            raise
    return found


def _sign(path: Path) -> Optional[Signs]:
    """Size and time of a regular file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _signs(folder: Path, names: Iterable[str]) -> Dict[str, Signs]:
    found = ((name, _sign(folder / name)) for name in names)
    return {name: signs for name, signs in found if signs is not None}


def _ram(base: Path) -> Ram:
    from ..probe import memory_available  # noqa: PLC0415

    found = os.statvfs(base)
    return Ram(found.f_bavail * found.f_frsize, memory_available() or 0)


def _size_of_newest(disk: Path) -> Optional[int]:
    """The size of this node's part of the newest checkpoint; None without one."""
    found = find(disk).checkpoints
    if not found:
        return None
    newest: Any = max(found, key=lambda one: (disk / one.name).stat().st_mtime_ns)
    names = [newest.name] if newest.single else [newest.name + "/" + name for name in _names(disk / newest.name)]
    return sum(size for size, _ in _signs(disk, names).values())


def _removed_at_logout() -> Optional[str]:
    """Why systemd would delete the folder at the user's last logout, or None (logind.conf(5), RemoveIPC)."""
    from ..start import removes_ipc, user_name  # noqa: PLC0415

    if not removes_ipc():
        return None
    text = "systemd deletes files in %s at the last logout (RemoveIPC=yes). As root, run: loginctl enable-linger %s"
    return text % (SHM, user_name())
