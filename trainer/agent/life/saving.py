"""A stop that keeps the work: asks the trainer to save, and waits while it does.

A trainer that saves on SIGTERM (transformers' ``enable_jit_checkpoint``) does it in its ranks. They are told
directly: torchrun, told itself, passes the signal on but kills them 30 s later, which a large checkpoint takes longer
than. A command without ranks gets the signal itself.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Iterable, Iterator, Optional, Tuple

from processes.census import Census
from processes.proc import send, stat_of

QUIET = 60.0  # seconds without a sign of work until it is given up
LOOK = 1.0  # seconds between looks for such signs


class Saving:
    """One such stop. ``going`` is asked until it is false."""

    def __init__(
        self, census: Census, started: Iterable[int], output: Optional[Path], patience: float, now: float
    ) -> None:
        self._census = census
        self._output = output
        self._until = now + patience
        self._sign: Tuple[int, ...] = ()
        self._signed = now
        self._looked = now
        census.look()
        for pid in list(census.ranks) or started:
            stat = stat_of(pid)
            if stat is not None:
                send(pid, stat, signal.SIGTERM)

    def going(self, now: float) -> bool:
        """Whether the trainer may still be at it."""
        if now - self._looked >= LOOK:
            self._looked = now
            sign = (sum(stat.ticks for stat in self._census.look().values()), *_sizes(self._output))
            if sign != self._sign:
                self._sign, self._signed = sign, now
        return now < self._until and now - self._signed < QUIET


def _sizes(folder: Optional[Path]) -> Iterator[int]:
    """Sizes and times of what lies in the folder of checkpoints, two levels deep."""
    pending = [(folder, 0)] if folder is not None else []
    while pending:
        path, depth = pending.pop()
        try:
            entries = list(os.scandir(path))
        except OSError:
            continue  # it is not there yet, or goes at this moment
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield from (found.st_size, found.st_mtime_ns)
            if depth < 1 and entry.is_dir(follow_symlinks=False):
                pending.append((Path(entry.path), depth + 1))
