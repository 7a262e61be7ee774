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
import os
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set

from ..checkpoints.names import COPIES
from ..checkpoints.places import Found, find
from ..link.copies import TEMPORARY, lower_priority
from ..run_files import NodePlan
from .moving import (
    JOIN,
    MARK,
    Signs,
    copy_file,
    empty,
    files_below,
    follow_renames,
    is_written,
    mirror_links,
    remove_temporaries,
    replace_by_link,
    sign_of,
    signs_of,
    to_drain,
)
from .ram import file_system, folder_of, left_in_ram, why_unusable

LOOK = 0.5  # seconds between looks
FULL = (errno.ENOSPC, errno.EDQUOT)


def deleted(drained: Iterable[str], present: Iterable[str]) -> List[str]:
    """The checkpoints that the program deleted: they were in RAM, and nothing of them is left there."""
    return sorted(set(drained) - set(present))


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
            remove_temporaries(disk, self._plan.node)
            why = why_unusable(self._base, disk)
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
                for each in files_below(disk / name):
                    (target / each).parent.mkdir(parents=True, exist_ok=True)
                    (target / each).symlink_to(disk / name / each)
            elif name in above and entry.is_dir(follow_symlinks=False):
                target.mkdir()
                self._show(disk, name + "/", folders, above, pointers)
            elif name in pointers:
                shutil.copy2(entry.path, target)
                self._copied.update(signs_of(self.folder, [name]))
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
                owners.update((one.name + "/" + name, one.name) for name in files_below(self.folder / one.name))
        pointers = {one.name for one in found.pointers if not one.link}
        files = signs_of(self.folder, [*owners, *pointers])
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
            mirror_links(disk, found)
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
                    whole = not is_written(path) and copy_file(path, disk / name, self._plan.node)
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
            if sign_of(path) == signs and (disk / name).stat().st_size == signs[0] and not is_written(path):
                replace_by_link(path, disk / name)

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
    found = left_in_ram(plan, base)
    for folder in found:
        follow_renames(folder, plan.output)
        empty(folder, plan.output, plan.node)
    return bool(found)


def _all_but_newest(disk: Path, names: Iterable[str]) -> List[str]:
    """These checkpoints, without the newest one that the disk has."""
    dated = [(found.st_mtime_ns, one.name) for one in find(disk).checkpoints for found in [(disk / one.name).stat()]]
    newest = max(dated, default=(0, ""))[1]
    return [name for name in names if name != newest]
