"""How long a checkpoint takes, and how often it is best saved."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.agent.contract.interval import HOUR, NONE, best_interval, time_between_failures
from trainer.plan.inputs import Cluster, Training
from trainer.plan.memory import adam_bytes

_WEIGHTS = 2 + 4  # bytes of a trained parameter: in 16 bits for the model, and in 32 bits for the optimizer


@dataclass(frozen=True)
class Saves:
    """A checkpoint and its interval. Times are seconds.

    Attributes:
        bytes: the size of a checkpoint: weights and optimizer of everything that is trained.
        seconds: the time to write it, if every node writes its part.
        between: the time between two failures.
        interval: the time between two saves that loses least.
    """

    bytes: float
    seconds: float
    between: float
    interval: float


def saves(training: Training, cluster: Cluster) -> Saves:
    """Return the checkpoint of a training, at the disks' rate and the rate of failures of the cluster."""
    size = training.trained * (_WEIGHTS + adam_bytes(training))
    seconds = size / (cluster.nodes * cluster.disk * 1e9)
    if cluster.failures is None:
        between = time_between_failures(cluster.nodes, NONE)
    else:
        between = HOUR * 1000 / (cluster.failures * cluster.nodes)
    return Saves(size, seconds, between, best_interval(seconds, between))


def describe(found: Saves, cluster: Cluster) -> str:
    """One sentence for the advice."""
    rate = "the published rate" if cluster.failures is None else "%g per 1,000 node hours" % cluster.failures
    return (
        "saving: a checkpoint has about %.3g GB, which takes %s at %g GB/s per node (--disk); with a failure every %s "
        "(%s, --failures) it is best saved every %s: train --save-every auto"
        % (found.bytes / 1e9, _span(found.seconds), cluster.disk, _span(found.between), rate, _span(found.interval))
    )


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("h", HOUR), ("min", 60.0)):
        if seconds >= 2 * length:
            return "%.3g %s" % (seconds / length, unit)
    return "%.2g s" % seconds
