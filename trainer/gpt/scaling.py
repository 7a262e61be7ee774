"""The fp16 loss scale: large enough to keep small gradients, halved when they overflow."""

from __future__ import annotations

import math

import torch

from trainer.gpt.errors import FailedError

FIRST = 2.0**16
GROWTH = 1000  # updates without an overflow after which it doubles; DeepSpeed's loss_scale_window


class Scale:
    """``value`` is 1 if it is not used. All ranks see the same norms, so they have the same scale."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.value = FIRST if is_used else 1.0
        self._good = 0

    def take(self, norm: torch.Tensor) -> bool:
        """Whether gradients of this norm can be used. Adapts the scale.

        Raises:
            FailedError: gradients overflow even at the smallest scale.
        """
        if not self.is_used:
            return True
        if math.isfinite(norm.item()):
            self._good += 1
            if self._good % GROWTH == 0:
                self.value *= 2
            return True
        self._good = 0
        if self.value <= 1.0:
            raise FailedError(
                "Current loss scale already at minimum: fp16 gradients overflow without a scale",
                "use --dtype bfloat16 or float32, or a lower --learning-rate",
            )
        self.value /= 2
        return False
