"""Writes this node's newest sample for node_exporter's textfile collector: ``clusterctl-RUN-RANK.prom``.

Each run has a file, because several may run on a node. A file appears in one rename, and is removed at the end of the
run. Files of this user's runs that stopped being written are removed too: their agents were killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any, Dict, Optional

from .contract.prometheus import Source, exposition
from .run_files import Events, NodePlan

LIMIT = 1 << 20  # bytes of a file
STALE = 600.0  # seconds without a write after which a file's agent is dead; a living one writes every 10 s
_LISTED = 10_000  # files of the folder
_OURS = re.compile(r"\.?clusterctl-.*\.prom(\.[0-9]+)?")


def path_of(plan: NodePlan) -> Optional[Path]:
    """The file of a run on this node; None if the inventory has no folder for it."""
    if plan.data.textfile is None:
        return None
    run = re.sub(r"[^A-Za-z0-9._-]", "-", plan.run)[:200]
    return Path(plan.data.textfile, "clusterctl-%s-%d.prom" % (run, plan.rank))


def remove(plan: NodePlan) -> None:
    """Remove the file at the end of a run."""
    path = path_of(plan)
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


class Textfile:
    """The file of a run on this node. A problem is reported once; later samples are tried nevertheless."""

    def __init__(self, plan: NodePlan, events: Events) -> None:
        self._plan, self._events = plan, events
        self._path = path_of(plan)
        self._reported = self._cleaned = False

    def write(self, sample: Dict[str, Any]) -> None:
        """Replace the file."""
        if self._path is None:
            return
        try:
            if not self._cleaned:
                remove_stale(self._path.parent, time.time())
                self._cleaned = True
            if self._plan.rank == 0 and self._plan.data.expected is not None:
                sample = dict(sample, expected=self._plan.data.expected.to_object())
            self._replace(self._path, exposition([Source(self._plan.run, self._plan.node, True, sample)]).encode())
        except OSError as error:
            if not self._reported:
                self._reported = True
                why = error.strerror or str(error)
                self._events.emit("notice", text="no samples for node_exporter in %s: %s" % (self._path.parent, why))

    def _replace(self, path: Path, data: bytes) -> None:
        if len(data) > LIMIT:
            raise OSError("the sample has %d bytes, more than the %d allowed" % (len(data), LIMIT))
        fresh = path.with_name(".%s.%d" % (path.name, os.getpid()))
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o644)  # node_exporter is another user, whatever the umask is
                file.write(data)
            fresh.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise


def remove_stale(folder: Path, now: float) -> None:
    """Remove this user's files of agents that were killed.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_LISTED), entries):  # noqa: B905 - Python 3.8
            if not _OURS.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another agent removed it
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.geteuid() and now - found.st_mtime > STALE:
                    os.unlink(entry.path)  # noqa: PTH108
