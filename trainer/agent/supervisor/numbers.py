"""The numbers in the output of a run's processes: steps and losses, for the events, the state and the watch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Hashable, List, Optional, Tuple

if TYPE_CHECKING:
    from ..reader import Pattern, Reader, Reading

FIELDS = ("step", "total", "loss", "lr", "eval_loss", "grad_norm", "ms", "tokens_per_second")
BURST = 20  # readings that are reported at once
RATE = 2.0  # readings per second that are reported in the long run


def finite(value: Any) -> Any:
    """A number that JSON has: None for NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Numbers:
    """Reads the streams of one attempt.

    Every reading goes to ``on_reading(rank, reading)``. Those of the lowest rank with a loss become the fields of
    progress events (``take``), at a bounded rate: of many readings the first ones and the last one remain. The lowest
    rank has the loss that all frameworks print; the output of the launcher counts as rank 0.

    Args:
        on_reading: see above.
        pattern: the user's pattern for the lines of the training; None: the known formats.

    Raises:
        PatternError: the pattern cannot be used.
    """

    def __init__(self, on_reading: Callable[[Optional[int], "Reading"], None], pattern: Optional[str] = None) -> None:
        self._on_reading = on_reading
        self._pattern: Optional[Pattern] = None
        if pattern is not None:
            from ..reader import Pattern  # noqa: PLC0415 - as below

            self._pattern = Pattern(pattern)
        self._readers: Dict[Hashable, Reader] = {}
        self._best: Optional[Tuple[bool, int]] = None  # whether the reported rank has no loss, and the rank
        self._waiting: List[Dict[str, Any]] = []
        self._room = float(BURST)
        self._at = time.monotonic()

    def feed(self, stream: Hashable, rank: Optional[int], data: bytes, skipped: int = 0) -> None:
        """Take the next bytes of a stream of a rank (None: the launcher); ``skipped`` bytes before them are missing."""
        reader = self._readers.get(stream)
        if reader is None:
            if not data:
                return
            from ..reader import Reader  # noqa: PLC0415 - its patterns are a tenth of an agent's start

            reader = self._readers[stream] = Reader(rank=rank, pattern=self._pattern)
        if skipped:
            reader.skip()
        self._add(rank, reader.feed(data))

    def close(self) -> None:
        """Take the readings that wait for more output."""
        for reader in self._readers.values():
            self._add(None, reader.close())

    def take(self, last: bool = False) -> List[Dict[str, Any]]:
        """The fields of the progress events that are due; ``last``: of all."""
        now = time.monotonic()
        self._room = min(BURST, self._room + (now - self._at) * RATE)
        self._at = now
        if not self._waiting or (self._room < 1 and not last):
            return []
        kept = BURST if last else int(self._room)
        found = [*self._waiting[: kept - 1], self._waiting[-1]] if len(self._waiting) > kept else self._waiting
        self._waiting = []
        self._room -= len(found)
        return found

    @property
    def too_slow(self) -> bool:
        """Whether the pattern took too long, and is no longer used."""
        return self._pattern is not None and self._pattern.too_slow

    def _add(self, rank: Optional[int], readings: "List[Reading]") -> None:
        for reading in readings:
            whose = reading.rank if reading.rank is not None else rank
            self._on_reading(whose, reading)
            whose = whose or 0
            order = (reading.loss is None, whose)
            if self._best is None or order < self._best:
                self._waiting = self._waiting if self._best is not None and self._best[1] == whose else []
                self._best = order
            if whose == self._best[1]:
                self._wait({name: finite(value) for name, value in reading._asdict().items() if value is not None})

    def _wait(self, values: Dict[str, Any]) -> None:
        """Keep a reading for the next events: values of the same step together, and the latest loss in any case."""
        fields = {name: values[name] for name in FIELDS if name in values}
        waiting = self._waiting
        if waiting and waiting[-1].get("step") == fields.get("step") is not None:
            waiting[-1].update(fields)
            return
        waiting.append(fields)
        if len(waiting) > BURST:
            del waiting[-3 if "loss" in waiting[-2] and "loss" not in fields else -2]
