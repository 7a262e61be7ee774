"""The loss on fixed samples, computed by all ranks together. All ranks return the same number."""

from __future__ import annotations

from typing import Dict

import torch

from trainer.gpt.data import Samples
from trainer.gpt.engine import Engine
from trainer.gpt.model import evaluating
from trainer.gpt.ranks import Ranks


def mean_loss(engine: Engine, samples: Samples, batches: int, batch: int, ranks: Ranks) -> float:
    """Return the mean loss, in nats per token, of the first ``batches`` x ``batch`` samples.

    The samples do not depend on the number of ranks. Every rank calls the engine equally often, because ZeRO-3 gathers
    weights in every call. Surplus losses are discarded.
    """
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    with evaluating(engine.model):
        for first in range(0, batches, ranks.world):
            number = first + ranks.rank
            start = min(number, batches - 1) * batch
            tokens, targets = samples.take(range(start, start + batch))
            loss = engine.evaluate(tokens.to(ranks.device), targets.to(ranks.device))
            if number < batches:
                total += loss.double()
    return float(ranks.gather(total.view(1)).sum().item()) / batches


def losses(engine: Engine, by_split: Dict[str, Samples], batches: int, batch: int, ranks: Ranks) -> Dict[str, float]:
    """Return the mean loss of each split."""
    return {split: mean_loss(engine, samples, batches, batch, ranks) for split, samples in by_split.items()}
