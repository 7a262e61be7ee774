"""Lets the program save to a folder in RAM, and moves what it saved to the disk while the training continues.

The program gets ``/dev/shm/clusterctl-UID/RUN-RANK`` as its output folder (``Copies.memory``). A thread copies
checkpoints from there into the output folder on the disk: each file when it has been quiet for a look, the last written
one last, so that a file that marks a checkpoint as complete comes after the others. A copied file in RAM becomes a
symlink to the disk. So RAM holds about one checkpoint, and the program can still read older ones. When it deletes an
old checkpoint (``save_total_limit``) the agent deletes it on the disk.

The output folder on the disk is the only one that resuming, copying and collecting know. Its existing entries are links
in RAM, so a log continues in its file on the disk. When no process of the attempt is left, everything else is moved to
the disk, before the agents meet. If the agent was killed, its guard or the next agent of the run does so. A restart of
the node loses what was only in RAM.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from ..checkpoints.names import COPIES
from ..checkpoints.places import Found, find
from ..link.copies import TEMPORARY, lower_priority
from ..run_files import NodePlan

SHM = Path("/dev/shm")  # noqa: S108 - tmpfs on every Linux; the folder in it is private
MARK = ".clusterctl"  # a file in the folder in RAM: without it the folder was deleted, and means nothing
LOOK = 0.5  # seconds between looks
LEAST = 256 << 20  # bytes that RAM must have for a checkpoint whose size is not known yet
SPARE = 2  # checkpoints that must fit: one is written while another one is copied to the disk
USABLE = 0.5  # share of the available RAM that checkpoints may use; the ranks need the rest
JOIN = 600.0  # seconds for the copy of a file that has begun
PIECE = 1 << 20

Signs = Tuple[int, int]  # size and modification time


class Ram(NamedTuple):
    """Bytes: free in ``/dev/shm``, and available in the machine."""

    shm: int
    available: int


def why_not(ram: Ram, checkpoint: Optional[int]) -> Optional[str]:
    """Why RAM is too small for checkpoints of this size (None: not known), or None."""
    needed = LEAST if checkpoint is None else SPARE * checkpoint
    if ram.shm < needed:
        return "%s has %d MB free, but %d MB are needed; enlarge it: mount -o remount,size=%dM %s" % (
            SHM, ram.shm >> 20, needed >> 20, (needed >> 20) * 2, SHM,
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


def folder_of(plan: NodePlan, base: Path = SHM) -> Path:
    """The folder in RAM of a run's node."""
    return base / ("clusterctl-%d" % os.geteuid()) / ("%s-%s" % (plan.run, plan.node.replace("/", "_")))


class Memory:
    """One attempt's folder in RAM. ``report(text)`` gets notices, in any thread."""

    def __init__(self, plan: NodePlan, report: Callable[[str], None], base: Path = SHM) -> None:
        self._plan = plan
        self._report = report
        self._base = base
        self.folder = folder_of(plan, base)
        self._disk = plan.output
        self._closed = threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._known: Dict[str, bool] = {}  # checkpoints that are or were in RAM, and whether each is a single file
        self._before: Dict[str, Signs] = {}
        self._failed = False

    def prepare(self) -> Optional[Path]:
        """Make the folder and start the thread. None if the program must save to the disk; the reason is reported."""
        disk = self._disk
        if disk is None or self._plan.data.copies is None or not self._plan.data.copies.memory:
            return None
        from ..supervisor.attempt import make_private  # noqa: PLC0415 - it imports this module

        try:
            why = _removed_at_logout() or why_not(_ram(self._base), _size_of_newest(disk))
            if why is None:
                make_private(self.folder.parent)
                make_private(self.folder)
                (self.folder / MARK).touch()
                disk.mkdir(parents=True, exist_ok=True)
                self._link_existing(disk)
        except OSError as error:
            why = str(error)
        if why is not None:
            self._report("checkpoints are saved to the disk, because RAM cannot be used: %s" % why)
            return None
        self._thread = threading.Thread(target=self._drain_all, name="memory", daemon=True)
        self._thread.start()
        return self.folder

    def finish(self) -> None:
        """Move everything to the disk, when no process of the attempt is left, and remove the folder."""
        if self._thread is None:
            return
        self._closed.set()
        self._thread.join(JOIN)
        self._thread = None
        assert self._disk is not None
        if not (self.folder / MARK).exists():
            self._report("%s was deleted: what was only in RAM is lost. %s is unchanged" % (self.folder, self._disk))
            return
        try:
            self._mirror_deletions(self._disk, find(self.folder))
            empty(self.folder, self._disk)
        except OSError as error:
            self._report(
                "what was saved to RAM could not be moved to the disk (%s): free some space in %s, then: "
                "clusterctl resume %s" % (error, self._disk, self._plan.run)
            )

    def _link_existing(self, disk: Path) -> None:
        """Let the folder show what the disk has. Checkpoints become folders of links, which a program can delete."""
        for one in find(disk).checkpoints:
            self._known[one.name] = one.single
            for name in [""] if one.single else _names(disk / one.name):
                target = self.folder / one.name / name if name else self.folder / one.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(disk / one.name / name if name else disk / one.name)
        for entry in os.scandir(disk):
            if not entry.name.startswith(TEMPORARY) and entry.name != COPIES:
                with contextlib.suppress(FileExistsError):
                    (self.folder / entry.name).symlink_to(entry.path)

    def _drain_all(self) -> None:
        lower_priority()
        while not self._closed.wait(LOOK):
            try:
                self._drain()
                self._failed = False
            except OSError as error:  # noqa: PERF203 - a full disk: the files wait in RAM
                if not self._failed:
                    self._report("a checkpoint in RAM could not be copied to the disk: %s" % error)
                self._failed = True

    def _drain(self) -> None:
        """Copy what is quiet to the disk, and delete there what the program deleted."""
        disk = self._disk
        assert disk is not None
        found = find(self.folder)
        singles = {one.name for one in found.checkpoints if one.single}
        pointers = {one.name for one in found.pointers if not one.link}
        names = [
            one.name + "/" + name
            for one in found.checkpoints
            if not one.single
            for name in _names(self.folder / one.name)
        ]
        files = _signs(self.folder, [*names, *singles, *pointers])
        self._known.update((one.name, one.single) for one in found.checkpoints)
        newest = max(singles, key=lambda name: files.get(name, (0, 0))[1], default=None)
        for name in to_drain(files, self._before, pointers):
            signs = files[name]
            with contextlib.suppress(FileNotFoundError):  # the program deleted or renamed it; the next look sees that
                _copy(self.folder / name, disk / name)
            if name in pointers or name == newest:  # the program writes these again
                continue
            with contextlib.suppress(OSError):
                if _sign(self.folder / name) == signs == _sign(disk / name):
                    _replace_by_link(self.folder / name, disk / name)
        self._before = files
        self._mirror_deletions(disk, found)

    def _mirror_deletions(self, disk: Path, found: Found) -> None:
        if not (self.folder / MARK).exists():  # another program deleted it: the disk has the only checkpoints
            return
        links = [name for name in self._known if os.path.lexists(self.folder / name)]
        for name in deleted(self._known, [*links, *(one.name for one in found.checkpoints)]):
            single = self._known.pop(name)
            with contextlib.suppress(FileNotFoundError):
                if single:
                    (disk / name).unlink()
                else:
                    shutil.rmtree(disk / name, ignore_errors=True)


def rescue(plan: NodePlan, base: Path = SHM) -> bool:
    """Move to the disk what an agent that was killed left in RAM. True if there was anything.

    Raises:
        OSError: the disk refuses; the rest stays in RAM.
    """
    if plan.output is None or plan.data.copies is None or not plan.data.copies.memory:
        return False
    folder = folder_of(plan, base)
    if not (folder / MARK).exists() or folder.lstat().st_uid != os.geteuid():
        return False
    empty(folder, plan.output)
    return True


def empty(folder: Path, disk: Path) -> None:
    """Move all files that are only in RAM to the disk, the last written one last, and remove the folder.

    Raises:
        OSError: the disk refuses; the rest stays in RAM.
    """
    names = [name for name in _names(folder, hidden=True) if name != MARK]
    files = _signs(folder, names)
    for name in to_drain(files, files):
        _copy(folder / name, disk / name)
    shutil.rmtree(folder)


def _copy(source: Path, target: Path) -> None:
    """Copy a file to the disk under a temporary name, and rename it when all of it is there.

    Skips it if the disk has it, or a later one: what an earlier attempt left in RAM replaces nothing newer.
    """
    found, there = source.stat(), _sign(target)
    if there is not None and (there == (found.st_size, found.st_mtime_ns) or there[1] > found.st_mtime_ns):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / (TEMPORARY + "memory-" + secrets.token_hex(4))  # nodes may share the folder
    try:
        with source.open("rb", buffering=0) as file, temporary.open("wb", buffering=0) as out:
            shutil.copyfileobj(file, out, PIECE)
            os.fchmod(out.fileno(), stat.S_IMODE(found.st_mode))
            os.fsync(out.fileno())
        os.utime(temporary, ns=(found.st_mtime_ns, found.st_mtime_ns))
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _replace_by_link(path: Path, target: Path) -> None:
    """Let a file in RAM be a link to its copy, in one rename."""
    link = path.parent / (TEMPORARY + "link")
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(target)
    link.replace(path)


def _names(folder: Path, below: str = "", hidden: bool = False) -> List[str]:
    """The regular files below a folder, without those that are still being copied."""
    found: List[str] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder / below):
            if entry.is_dir(follow_symlinks=False):
                found += _names(folder, below + entry.name + "/", hidden)
            elif entry.is_file(follow_symlinks=False) and not entry.name.startswith(TEMPORARY):
                found.append(below + entry.name)
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
