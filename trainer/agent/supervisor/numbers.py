"""The numbers in the output of a run's processes: steps and losses, for the events, the state and the watch."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Hashable, List, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from ..reader import Pattern, Reader, Reading
    from ..reader.apart import Bars, Steps

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
        argv: the command line; see ``reader.apart``.
        start: the step of the checkpoint from which it resumes.

    Raises:
        PatternError: the pattern cannot be used.
    """

    def __init__(
        self,
        on_reading: Callable[[Optional[int], "Reading"], None],
        pattern: Optional[str] = None,
        argv: Sequence[str] = (),
        start: int = 0,
    ) -> None:
        self._on_reading = on_reading
        self._pattern: Optional[Pattern] = None
        if pattern is not None:
            from ..reader import Pattern  # noqa: PLC0415 - as below

            self._pattern = Pattern(pattern)
        self._argv, self._start = argv, start
        self._readers: Dict[Hashable, Reader] = {}
        self._bars: Dict[Hashable, Bars] = {}
        self._steps: Dict[int, Steps] = {}  # by rank
        self._best: Optional[Tuple[bool, int]] = None  # whether the reported rank has no loss, and the rank
        self._waiting: List[Dict[str, Any]] = []
        self._logged: Optional[int] = None  # the last step in the files of loggers
        self.complete = False  # the output has a step with its loss, so the files of loggers do not count
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
        if rank is None or self._pattern:  # the launcher's streams are one; a pattern reads one line at a time
            self._add(rank, reader.feed(data))
        else:
            self._apart(stream, rank, reader.feed(data), data, skipped)

    def logged(self, readings: "List[Reading]") -> None:
        """Take readings of the files of rank 0's loggers. They are not for the watch, as they may be minutes late."""
        for reading in [] if self.complete else readings:
            self._logged = reading.step
            self._report(0, reading)

    def close(self) -> None:
        """Take the readings that wait for more output."""
        for reader in self._readers.values():
            self._add(None, reader.close())
        for rank, steps in self._steps.items():
            self._add(rank, steps.close())

    def _apart(self, stream: Hashable, rank: int, readings: "List[Reading]", data: bytes, skipped: int) -> None:
        """Add the readings of one of a rank's streams, with the steps that another stream of the rank shows."""
        from ..reader import apart  # noqa: PLC0415

        steps = self._steps.get(rank)
        if steps is None:
            steps = self._steps[rank] = apart.Steps(apart.pace(self._argv, self._start))
        if skipped:
            self._add(rank, steps.skip())
        bars = self._bars.setdefault(stream, apart.Bars())
        for step, total in bars.feed(data):
            self._add(rank, steps.bar(step, total))
        for reading in readings:
            without = reading.source == "trainer" and reading.step is None
            self._add(rank, steps.line(reading) if without else [reading])

    def take(self, last: bool = False) -> List[Dict[str, Any]]:
        """The fields of the progress events that are due; ``last``: of all."""
        for rank, steps in self._steps.items():
            self._add(rank, steps.look())
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
            if reading.step is not None and reading.loss is not None:
                if reading.step < (self._logged or 0):  # as of an epoch: the steps of the loggers count on
                    continue
                self.complete = True
            self._report(whose or 0, reading)

    def _report(self, whose: int, reading: "Reading") -> None:
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
