"""ZeRO-3's parameters before the engine exists: each is sharded at creation."""

from __future__ import annotations

from typing import Any, ContextManager, cast

import torch
from torch import nn

from trainer.gpt import zero_config, zero_library
from trainer.gpt.config import Config
from trainer.gpt.ranks import Ranks


def making(config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype) -> ContextManager[Any]:
    """Within it, new modules keep only this rank's share of their parameters, where the options put it.

    Raises:
        RefusedError: DeepSpeed is missing, or the configuration is invalid.
    """
    settings = zero_config.make(config, 3, micro_steps, dtype, ranks.device.type == "cuda")
    return cast("ContextManager[Any]", zero_library.load(ranks).zero.Init(config_dict_or_path=settings))


def whole(parameter: nn.Parameter) -> ContextManager[Any]:
    """Within it, the parameter is whole on all ranks. Afterwards each has its share of rank 0's value."""
    from deepspeed import zero  # noqa: PLC0415 - other engines need no DeepSpeed

    return cast("ContextManager[Any]", zero.GatheredParameters(parameter, modifier_rank=0))
