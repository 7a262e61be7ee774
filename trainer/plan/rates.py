"""Learning rates: a published rate, adapted to the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Tuple

from trainer.plan.wish import Training

# For pretraining: parameters, rate, tokens per batch. GPT-3, arXiv 2005.14165, table 2.1.
_GPT3 = (
    (125e6, 6e-4, 0.5e6),
    (350e6, 3e-4, 0.5e6),
    (760e6, 2.5e-4, 0.5e6),
    (1.3e9, 2e-4, 1e6),
    (2.7e9, 1.6e-4, 1e6),
    (6.7e9, 1.2e-4, 2e6),
    (13e9, 1e-4, 2e6),
    (175e9, 0.6e-4, 3.2e6),
)


_FAR = 8.0  # times the batch


@dataclass(frozen=True)
class Rate:
    """A published learning rate, and the rates that follow for the planned batch.

    Attributes:
        base: the published rate.
        batch: its batch.
        unit: of the batch: ``tokens`` for pretraining, ``samples`` for fine-tuning.
        source: the publication.
        linear: scaled with the batch, for SGD (Goyal et al., arXiv 1706.02677).
        root: scaled with the square root of the batch, for Adam (Malladi et al., arXiv 2205.10287).
    """

    base: float
    batch: float
    unit: str
    source: str
    linear: float
    root: float

    @property
    def far(self) -> bool:
        """Whether the batch is too far from the published one for the rules to hold."""
        return not 1 / _FAR <= self.linear / self.base <= _FAR


def rate(training: Training) -> Rate:
    """Return the rate for a training's global batch."""
    base, batch, unit, source = _known(training)
    factor = (training.tokens if unit == "tokens" else training.global_batch) / batch
    return Rate(base, batch, unit, source, base * factor, base * math.sqrt(factor))


def _known(training: Training) -> Tuple[float, float, str, str]:
    size = training.shape.parameters
    if training.method == "pretrain":
        _, base, tokens = min(_GPT3, key=lambda row: abs(math.log(row[0] / size)))
        return base, tokens, "tokens", "GPT-3, arXiv 2005.14165, table 2.1"
    if training.method == "full":
        return 2e-5, 64.0, "samples", "Llama 2's fine-tuning, arXiv 2307.09288, section 3.1"
    # 7B and 13B: 2e-4, 33B and 65B: 1e-4. At 16 samples for all data sets; above 13B only for OASST1.
    if size < 20e9:
        return 2e-4, 16.0, "samples", "QLoRA, arXiv 2305.14314, table 9"
    return 1e-4, 16.0, "samples", "QLoRA, arXiv 2305.14314, table 9"
