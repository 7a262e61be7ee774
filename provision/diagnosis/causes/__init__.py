"""The table of causes: one file a subject, one row a cause. docs/troubleshooting.md is made of it.

The order counts: the first row that knows a line has it, so rows that say more stand before those that say less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.diagnosis.causes import (
    checkpoints,
    environment,
    files,
    gpu,
    infiniband,
    memory,
    nccl,
    numbers,
    processes,
    start,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.diagnosis.cause import Cause

SUBJECTS: Mapping[str, tuple[Cause, ...]] = {
    "Memory": memory.CAUSES,
    "GPUs and their driver": gpu.CAUSES,
    "InfiniBand and RoCE": infiniband.CAUSES,
    "NCCL": nccl.CAUSES,
    "The ranks do not find each other": start.CAUSES,
    "Compiling, versions, modules": environment.CAUSES,
    "Checkpoints": checkpoints.CAUSES,
    "Files, disks, models, data": files.CAUSES,
    "Numbers and DeepSpeed's configuration": numbers.CAUSES,
    "Processes, agents, nodes": (*processes.CAUSES, processes.EXCEPTION),
}

TABLE: tuple[Cause, ...] = tuple(cause for causes in SUBJECTS.values() for cause in causes)
