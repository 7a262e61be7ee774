"""A trace of some steps, written by torch's profiler: every operation, its kernels, and when they ran.

``OUT/profile/rank0.json.gz`` opens without a network in chrome://tracing of Chrome or Chromium, or in a local copy of
Perfetto (https://ui.perfetto.dev). Only rank 0 is traced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile, schedule

from trainer.lm.config import Config, steps_to_profile
from trainer.lm.ranks import Ranks

TRACE = "profile/rank0.json.gz"
_SHOWN = 10  # kernels
_LONGEST = 80  # characters of a kernel's name


class Profile:
    """The trace of a training: call ``step`` after each step, then ``end``."""

    def __init__(self, config: Config, ranks: Ranks, say: Callable[[str], None]) -> None:
        """Start it if it is configured. ``say`` receives the slowest kernels."""
        self._first, last = steps_to_profile(config.profile_steps) or (1, 1)
        self._path = Path(config.out) / TRACE
        self._device = ranks.device
        self._say = say
        self._done = 0
        self._running: Any = None
        if not config.profile or not ranks.is_first:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        warmup = int(self._first > 1)
        plan = schedule(wait=self._first - 1 - warmup, warmup=warmup, active=last - self._first + 1, repeat=1)
        activities = [ProfilerActivity.CPU]
        if ranks.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
        self._running.start()

    def step(self) -> None:
        """Mark the end of a step."""
        if self._running:
            self._done += 1
            self._running.step()

    def end(self) -> None:
        """Write a trace that is not complete, or report that there is none."""
        if self._running:
            self._running.stop()
            if self._done < self._first:
                self._say("profile: no trace, because the training ended before step %d of this command" % self._first)

    def _write(self, trace: Any) -> None:
        if self._done < self._first:  # torch calls it at the end of every training
            return
        trace.export_chrome_trace(str(self._path))
        for line in slowest(trace, self._device):
            self._say(line)
        self._say("profile: steps %d to %d of this command in %s" % (self._first, self._done, self._path))


def slowest(trace: Any, device: torch.device) -> List[str]:
    """Return a table of the kernels that took the most time; on a CPU, of the operations."""
    is_gpu = device.type == "cuda"
    found = [each for each in trace.key_averages() if not is_gpu or each.device_type == DeviceType.CUDA]
    name = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    found = [each for each in found if not each.key.startswith("ProfilerStep")]
    whole = sum(getattr(each, name) for each in found) or 1
    found.sort(key=lambda each: -getattr(each, name))
    lines = ["profile:        ms  share  calls  %s" % ("kernel" if is_gpu else "operation")]
    for each in found[:_SHOWN]:
        spent = getattr(each, name)
        lines.append(
            "profile: %9.2f %5.1f%% %6d  %s" % (spent / 1e3, 100 * spent / whole, each.count, each.key[:_LONGEST])
        )
    return lines
