"""Ends every process of a run on this node: SIGTERM, after a grace SIGKILL, until a look at all of /proc finds none."""

from __future__ import annotations

import signal
import time
from typing import Dict, List, Optional, Set

from processes.census import Census
from processes.proc import Stat, reap_all, send, stat_of

HURRY = 0.02  # seconds between looks at those that are known
CERTAIN = 0.5  # seconds between looks at all of /proc while some are known to live
STUBBORN = 30.0  # seconds after SIGKILL until a process is given up: it hangs in the kernel


class Ending:
    """One ending. ``step`` is called until it is true; then ``left`` are those that nothing could end."""

    def __init__(self, census: Census, grace: float) -> None:
        self.left: List[int] = []
        self.refused: Set[int] = set()  # another user's: a signal was not allowed
        self._census = census
        self._grace = grace
        self._began: Optional[float] = None
        self._told: Set[int] = set()
        self._living: Dict[int, Stat] = {}
        self._looked = 0.0

    def hurry(self, grace: float) -> None:
        """Shorten the grace."""
        self._grace = min(self._grace, grace)

    def step(self, now: float) -> bool:
        """Look, and signal those that live. True when none is left or the rest is given up."""
        self._living = {pid: stat for pid, stat in self._living.items() if _lives(pid, stat)}
        if not self._living or now - self._looked >= CERTAIN:
            self._looked = now
            self._living = self._census.all()
        if not self._living:
            self.left = []
            return True
        if self._began is None:
            self._began = now
        patience = self._began + self._grace
        if now >= patience:
            self._census.kill()
        for pid, stat in self._living.items():
            if now >= patience:
                self._send(pid, stat, signal.SIGKILL)
            elif pid not in self._told:
                self._told.add(pid)
                self._send(pid, stat, signal.SIGTERM)
                self._send(pid, stat, signal.SIGCONT)  # one that was stopped would sleep through the grace
        self.left = sorted(self._living)
        if self._living.keys() <= self.refused:
            return True
        return now >= patience + STUBBORN

    def _send(self, pid: int, stat: Stat, number: int) -> None:
        if not send(pid, stat, number):
            self.refused.add(pid)


def _lives(pid: int, stat: Stat) -> bool:
    now = stat_of(pid)
    return now is not None and now.start == stat.start and now.state not in "ZX"


def end_all(census: Census, grace: float) -> List[int]:
    """End every process of the run, and wait for it. Returns the pids that nothing could end."""
    ending = Ending(census, grace)
    while True:
        reap_all()
        if ending.step(time.monotonic()):
            return ending.left
        time.sleep(HURRY)  # most of them are no children of ours: nothing tells of their end
