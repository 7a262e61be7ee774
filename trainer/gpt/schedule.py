"""The learning rate of each step."""

from __future__ import annotations

import math

from trainer.gpt.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of the step after ``step`` steps: a linear warmup, then the ``schedule``."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return config.learning_rate
    end = config.decay_iters or config.max_iters
    done = min(1.0, (step - config.warmup_iters) / max(1, end - config.warmup_iters))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    lowest = config.learning_rate / 10 if config.min_lr < 0 else config.min_lr
    return lowest + (config.learning_rate - lowest) * left
