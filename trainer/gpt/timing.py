"""How long the parts of a step take, and what that means: tokens/s and MFU.

On GPUs the GPU's own clock is read, later, when it has passed: nothing waits for the sake of being timed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from trainer.ds_config import ConfigError, find

PARTS = ("forward", "backward", "optimizer", "communication")


def peak(device: torch.device) -> Optional[float]:
    """FLOP/s of which MFU is a share; None where nobody has written it down."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device)).tflops * 1e12
    except ConfigError:
        return None


class Lap:
    """One step: ``wait`` until it is over, then ``read``."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.parts: List[Tuple[str, Any, Any]] = []

    def wait(self) -> None:
        """Until the GPU is past it."""
        if not isinstance(self.begin, float):
            self.end.synchronize()

    def read(self) -> Dict[str, float]:
        """Seconds of the whole and of each part, when it is over."""
        found = {"step": _between(self.begin, self.end)}
        for name, begin, end in self.parts:
            found[name] = found.get(name, 0.0) + _between(begin, end)
        return found


def _between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class Watch:
    """Times steps and their parts on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._lap = Lap(self._now())

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """A step begins."""
        self._lap = Lap(self._now())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step."""
        begin = self._now()
        yield
        self._lap.parts.append((name, begin, self._now()))

    def end(self) -> Lap:
        """The step is over."""
        self._lap.end = self._now()
        return self._lap
