"""How long the parts of a step take, and what that means: tokens/s and MFU.

On GPUs the GPU's own clock is read, later, when it has passed: nothing waits for the sake of being timed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

PARTS = ("forward", "backward", "optimizer", "communication")

# Dense bf16 FLOP/s (fp16 before Ampere) in NVIDIA's data sheets, by a part of the name that torch tells, a space behind
# it; the first that fits counts. Those of A10G, H20 and H800 as they are reported.
PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H20 ", 148e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4 ", 121e12),
    ("A6000", 155e12),
    ("A40 ", 150e12),
    ("A30 ", 165e12),
    ("A10G ", 70e12),
    ("A10 ", 125e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4 ", 65e12),
)


def peak(device: torch.device) -> Optional[float]:
    """FLOP/s of which MFU is a share; None where nobody has written it down."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device) + " "
    return next((flops for part, flops in PEAKS if part in name), None)


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
