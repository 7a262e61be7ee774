"""The figures of a finished step, and the check that they are finite."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

import torch

from trainer.gpt.config import Config
from trainer.gpt.errors import FailedError
from trainer.gpt.model import Shape, flops_per_token
from trainer.gpt.timing import Lap, peak


class Figures:
    """Converts the numbers of all ranks into figures for the log. ``tokens``: per step, on all ranks."""

    def __init__(self, config: Config, shape: Shape, tokens: int, world: int, device: torch.device) -> None:
        self._config = config
        self._tokens = tokens
        self._device = device
        most = peak(device)
        self._whole = world * most / flops_per_token(shape, config.block_size) if most else None  # tokens/s at MFU 1

    def of(self, lap: Lap, rows: List[List[float]], rate: float) -> Dict[str, Any]:
        """Return the figures of a step. Its rows are loss, gradient norm, and the signal to stop."""
        seconds = lap.read()
        speed = self._tokens / seconds["step"]
        memory = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None
        mfu = speed / self._whole if self._whole else None
        loss = sum(row[0] for row in rows) / len(rows)
        figures = {"loss": loss, "norm": rows[0][1], "lr": rate, "tokens": speed}
        return dict(figures, mfu=mfu, memory=memory, seconds=seconds)

    def check(self, step: int, rows: List[List[float]], may_overflow: bool, last: Optional[str]) -> None:
        """Check for NaN and infinity. ``may_overflow``: fp16 gradients may be infinite, which skips the step.

        Raises:
            FailedError: a number is not finite; names the step, the rank and ``last``, the newest checkpoint.
        """
        for rank, (loss, norm, _) in enumerate(rows):
            what = "loss is %s" % loss if not math.isfinite(loss) else ""
            if not what and not math.isfinite(norm) and not may_overflow:
                what = "norm of the gradient is %s" % norm
            if not what:
                continue
            lower = "--learning-rate %g" % (self._config.learning_rate / 2)
            kept = (
                "%s/%s is the last good checkpoint" % (self._config.out, last) if last else "no checkpoint exists yet"
            )
            fix = "--resume latest %s" % lower if last else "use a lower --learning-rate, such as %s" % lower
            raise FailedError("%s at step %d on rank %d; %s" % (what, step, rank, kept), fix)
