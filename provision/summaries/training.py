"""After ``train`` and ``resume``."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.inventory import fold
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from provision.run.record import TrainResult


def trained(result: TrainResult) -> Summary:
    """After ``train`` and ``resume``: a finished or a detached run."""
    data = {
        "run": result.run,
        "state": result.state,
        "nodes": list(result.nodes),
        "world_size": result.world_size,
        "steps": result.steps,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "seconds": round(result.seconds, 1),
        "network": result.network,
        "output": result.output,
        "logs": str(result.folder),
    }
    if result.state == "detached":
        return data, (
            f"run {result.run} is running on {fold(result.nodes)} (world size {result.world_size})\n"
            f"to check it: clusterctl status {result.run}; to follow it: clusterctl logs -f {result.run}\n"
            f"to stop it: clusterctl stop {result.run}"
        )
    losses = ""
    if result.first_loss is not None and result.last_loss is not None:
        losses = f", loss {result.first_loss:.4g} -> {result.last_loss:.4g}"
    # Without --output, the checkpoint directory and the number of steps of a script are not known.
    known = PurePosixPath(result.output).name != result.run
    steps = f"{result.steps} steps{losses}, " if result.steps is not None else ""
    text = (
        f"logs in {result.folder}\n"
        f"{'checkpoint' if known else 'all of the run'} in {result.nodes[0]}:{result.output}\n"
        f"trained on {fold(result.nodes)} (world size {result.world_size}): {steps}{result.seconds:.0f} s"
        + (f"; NCCL used {result.network}" if result.network else "")
    )
    return data, text
