"""What a rank computes in one micro-step."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch


class Batch(NamedTuple):
    """Tokens and what follows them.

    Attributes:
        tokens: (batch, n), int64.
        targets: (batch, n), int64; -100 where there is no loss.
        ends: of the documents over the flattened batch, int32: from 0 to all tokens, the last value repeated up to a
            fixed length, so that shapes stay the same. None: each row is one document.
        count: a float32 scalar: targets of the whole step on all ranks, divided by ranks and micro-steps. With it the
            mean over ranks and micro-steps is the mean over the step's targets. None: all positions are targets.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ends: Optional[torch.Tensor] = None
    count: Optional[torch.Tensor] = None

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, without waiting."""
        return Batch(*(None if each is None else each.to(device, non_blocking=True) for each in self))

    def pinned(self) -> Batch:
        """Copy to page-locked memory, from which copies to a GPU need no wait."""
        return Batch(*(None if each is None else each.pin_memory() for each in self))
