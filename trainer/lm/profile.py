"""A trace of some steps, written by torch's profiler: every operation, its kernels, and when they ran.

``OUT/profile/rank0.json.gz`` opens without a network in chrome://tracing of Chrome or Chromium, or in a local copy of
Perfetto (https://ui.perfetto.dev). Only rank 0 is traced.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, List

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile, schedule

from trainer.lm.config import Config, steps_to_profile
from trainer.lm.ranks import Ranks

TRACE = "profile/rank0.json.gz"
_SHOWN = 10  # kernels
_LONGEST = 80  # characters of a kernel's name


@contextmanager
def profiled(config: Config, ranks: Ranks, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Within it, steps are traced. Call what it returns after each step; ``say`` receives the slowest kernels."""
    steps = steps_to_profile(config.profile_steps) if config.profile and ranks.is_first else None
    if steps is None:
        yield lambda: None
        return
    first, last = steps
    path = Path(config.out) / TRACE
    path.parent.mkdir(parents=True, exist_ok=True)
    done = 0

    def write(trace: Any) -> None:  # also called at an end before the first of these steps
        if done < first:
            return
        trace.export_chrome_trace(str(path))
        for line in slowest(trace, ranks.device):
            say(line)
        say("profile: steps %d to %d of this command in %s" % (first, done, path))

    def step() -> None:
        nonlocal done
        done += 1
        running.step()

    warmup = int(first > 1)
    plan = schedule(wait=first - 1 - warmup, warmup=warmup, active=last - first + 1, repeat=1)
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, schedule=plan, on_trace_ready=write) as running:
        yield step
    if done < first:
        say("profile: no trace, because the training ended before step %d of this command" % first)


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
