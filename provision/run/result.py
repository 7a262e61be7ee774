"""What became of a run that was followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any


@dataclass(frozen=True)
class TrainResult:
    """A run that has finished, or goes on without this command.

    Attributes:
        run: its id.
        state: ``finished``, or ``detached``: it goes on.
        folder: this machine's record of it.
        nodes: in the order of their ranks.
        world_size: processes in all.
        seconds: how long it was followed.
        steps: the last one that was told.
        first_loss: the first that was told.
        last_loss: the last one.
        output: the path on rank 0's node.
        network: what NCCL's own log says that it used; "" when it says nothing.
    """

    run: str
    state: str
    folder: Path
    nodes: tuple[str, ...]
    world_size: int
    seconds: float
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    output: str
    network: str = ""


def output_of(plan: Mapping[str, Any], folder: str) -> str:
    """Where rank 0's node has the trained model, or at least the run's folder."""
    resume, progress = plan.get("resume"), plan.get("progress")
    if resume and resume.get("output"):
        return str(PurePosixPath(folder) / str(resume["output"]))
    return str((PurePosixPath(folder) / str(progress)).parent) if progress else folder
