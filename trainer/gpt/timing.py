"""Times the parts of a step, and derives tokens/s and MFU from them.

On GPUs it reads the GPU's clock later, when the step is over, so timing never makes the GPU wait.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from trainer.ds_config import ConfigError, find

PARTS = ("forward", "backward", "optimizer", "communication")


def peak(device: torch.device) -> Optional[float]:
    """Peak FLOP/s of a device for MFU, or None if it is unknown."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device)).tflops * 1e12
    except ConfigError:
        return None


class Lap:
    """The times of one step: ``wait`` until it is over, then ``read``."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.parts: List[Tuple[str, Any, Any]] = []

    def wait(self) -> None:
        """Wait until the GPU has finished the step."""
        if not isinstance(self.begin, float):
            self.end.synchronize()

    def read(self) -> Dict[str, float]:
        """Return the seconds of the whole step and of each part, after the step."""
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
        """Start a step."""
        self._lap = Lap(self._now())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step."""
        begin = self._now()
        yield
        self._lap.parts.append((name, begin, self._now()))

    def end(self) -> Lap:
        """End the step and return its times."""
        self._lap.end = self._now()
        return self._lap
