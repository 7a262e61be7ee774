"""Watches the output folder of one node: when its checkpoints have changed, and whether any are recognised."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from ..run_files import NodePlan

BUSY = 30.0  # seconds after which an offer is made although files still change: a program that is always saving
DOUBTFUL = 60.0  # seconds after which a checkpoint that is not complete, or not recognised, is reported
EARLY = 15.0  # seconds in which rank 0 waits for the offers of spares
# Seconds between the offers of a spare in this time, and later: rank 0 may start, or reconnect.
OFTEN, SELDOM = 2.0, 60.0
LARGE = 1 << 20  # bytes of files that are no known checkpoint, from which they are reported
ENTRIES = 10_000  # files and folders that are examined for unknown files
LOGS = (".log", ".jsonl", ".json", ".txt", ".csv", ".out", ".err", ".md", ".yaml", ".yml", ".png", ".html", ".wandb")


class Unknown(NamedTuple):
    """Files that are no known checkpoint. ``largest``: the path of the largest one below the folder."""

    size: int
    largest: str


def unknown_files(output: Path, since: float) -> Unknown:
    """The size of all files but logs that were written after the time ``since``; hidden ones do not count."""
    total, most, largest, left = 0, -1, "", ENTRIES
    for folder, folders, names in os.walk(output):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            left -= 1
            if name.startswith(".") or name.endswith(LOGS) or "tfevents" in name:
                continue
            path = Path(folder) / name
            try:
                found = path.lstat()
            except OSError:
                continue  # it was deleted
            if found.st_mtime >= since:
                total += found.st_size
                if found.st_size > most:
                    most, largest = found.st_size, str(path.relative_to(output))
        left -= len(folders)
        if left < 0:
            break
    return Unknown(total, largest)


class Watcher:
    """Sees that the checkpoints in this node's output folder changed, and that they are quiet again."""

    def __init__(self, plan: NodePlan, *, spare: bool = False) -> None:
        self.plan = plan
        self._spare = spare  # it has no ranks
        self._signs: Any = None
        self._offered: Any = None
        self._offered_at = 0.0
        self._strange: Optional[float] = None  # since when there are large files, but no checkpoint
        self._doubted = False
        self._began, self._started = time.time(), time.monotonic()
        self._largest = ""

    def look(self, now: float) -> Optional[Dict[str, Any]]:
        """A new offer, if there is one."""
        from ..checkpoints import selection  # noqa: PLC0415
        from . import held  # noqa: PLC0415

        output = self.plan.output
        assert output is not None
        before, self._signs = self._signs, selection.signs(output)
        known, _ = self._signs
        unknown = Unknown(0, "") if known or self._doubted else unknown_files(output, self._began)
        if unknown.size < LARGE:
            self._strange = None
        elif self._strange is None:
            self._strange, self._largest = now, unknown.largest
        quiet = self._signs == before or now - self._offered_at >= BUSY
        again = self._spare and now - self._offered_at >= (OFTEN if now - self._started < EARLY else SELDOM)
        if not quiet or before is None or (self._signs == self._offered and not again):
            return None
        self._offered, self._offered_at = self._signs, now
        found = selection.offer(output, self.plan.data.first_rank, self.plan.data.processes)
        return dict(found, copies=held.offers(output))

    def doubts(self, now: float) -> List[str]:
        """What the user should know about the output folder, once."""
        if self._strange is None or now - self._strange < DOUBTFUL or self._doubted:
            return []
        self._doubted = True
        return [
            "no checkpoint is recognised in %s, although the program writes there (%s), so none is copied to other "
            "nodes and the run cannot resume from one. Its files must be as in docs/runs.md, section Resuming; if it "
            "saves elsewhere: --output DIR" % (self.plan.output, self._largest)
        ]
