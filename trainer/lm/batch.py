"""What a training takes in a micro-step: a batch, where it comes from, and which samples each rank takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Protocol

import torch

IGNORED = -100  # a target without a loss, as in torch's cross_entropy


@dataclass(frozen=True)
class Batch:
    """A rank's part of a micro-step.

    Attributes:
        tokens: (batch, n), int64.
        targets: (batch, n), int64: the next tokens, and IGNORED where there is no loss.
        ends: int32, the ends of the documents in the flattened batch: starts with 0, and repeats the last end up to a
            length that is the same for every batch. A row's padding is a document. None: each row is one document.
        count: the targets of the whole step, divided by ranks x micro-steps. The mean over ranks and micro-steps of
            (sum of a batch's losses / count) is the mean loss of the step.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ends: Optional[torch.Tensor]
    count: float

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        ends = None if self.ends is None else self.ends.to(device, non_blocking=True)
        tokens, targets = (each.to(device, non_blocking=True) for each in (self.tokens, self.targets))
        return Batch(tokens, targets, ends, self.count)

    def pinned(self) -> Batch:
        """Return the batch in memory from which a GPU copies without waiting."""
        ends = None if self.ends is None else self.ends.pin_memory()
        return Batch(self.tokens.pin_memory(), self.targets.pin_memory(), ends, self.count)


@dataclass(frozen=True)
class Layout:
    """How the rows of a step are divided: over ranks, micro-steps, and the rows of a batch."""

    rank: int
    world: int
    micro_steps: int
    batch: int

    @property
    def rows(self) -> int:
        """The rows of a step on all ranks."""
        return self.world * self.micro_steps * self.batch

    def numbers(self, step: int, micro: int) -> range:
        """Return the numbers of the rows that this rank takes in a micro-step."""
        first = ((step * self.micro_steps + micro) * self.world + self.rank) * self.batch
        return range(first, first + self.batch)

    def count(self, targets: int) -> float:
        """Return a batch's ``count`` in a step with this number of targets."""
        return max(1, targets) / (self.world * self.micro_steps)


class Source(Protocol):
    """Batches by number. What a step sees does not depend on the number of ranks."""

    def batch(self, layout: Layout, step: int, micro: int) -> Batch:
        """Return a rank's batch of a micro-step."""
