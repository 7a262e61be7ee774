"""A stage as the user sees it: it starts, advances and finishes. Nothing else emits these events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from provision.model import Progress, StageFinished, StageStarted

if TYPE_CHECKING:
    from provision.model import Emit

Unit = Literal["bytes", "nodes", "steps"]


class Stage:
    """A stage. ``states`` and ``summary`` are shown when it finishes."""

    def __init__(self, emit: Emit, key: str, title: str, total: int | None, unit: Unit) -> None:
        self.key = key
        self.states: Mapping[str, str] = {}
        self.summary = ""
        self.failed = 0  # nodes that failed, where no state says so
        self.running = ""  # what is still running after the command stops showing it
        self._emit, self._total = emit, total
        self._started = time.monotonic()
        self._seconds: float | None = None
        self._event = StageStarted(key, title, total, unit)

    @property
    def seconds(self) -> float:
        """How long the stage took, or has taken so far."""
        return time.monotonic() - self._started if self._seconds is None else self._seconds

    def start(self) -> None:
        """Show the start."""
        self._emit(self._event)

    def progress(self, done: int, note: str = "") -> None:
        """Report how far the stage is."""
        self._emit(Progress(self.key, done, self._total, note))

    def finish(self) -> None:
        """Show the end. A second call does nothing."""
        if self._seconds is None:
            self._seconds = self.seconds
            self._emit(StageFinished(self.key, self._seconds, self.states, self.summary, self.running, self.failed))


@contextmanager
def stage(emit: Emit, key: str, title: str, total: int | None = None, unit: Unit = "nodes") -> Iterator[Stage]:
    """Show a stage while the block runs. A block that raises has no end to show, unless it called ``finish``."""
    shown = Stage(emit, key, title, total, unit)
    shown.start()
    yield shown
    shown.finish()
