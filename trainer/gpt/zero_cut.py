"""ZeRO-3's parameters before there is an engine: each is cut over the ranks as soon as it is made."""

from __future__ import annotations

from typing import Any, ContextManager, cast

import torch
from torch import nn

from trainer.gpt import zero_config, zero_library
from trainer.gpt.config import Config
from trainer.gpt.ranks import Ranks


def making(config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype) -> ContextManager[Any]:
    """Inside it, modules that are made keep this rank's share of their parameters, where the options want it.

    Raises:
        RefusedError: there is no DeepSpeed, or no such configuration.
    """
    made = zero_config.make(config, 3, micro_steps, dtype, ranks.device.type == "cuda")
    return cast("ContextManager[Any]", zero_library.load(ranks).zero.Init(config_dict_or_path=made))


def whole(parameter: nn.Parameter) -> ContextManager[Any]:
    """Inside it, the parameter is whole on all ranks; afterwards each has its share of what rank 0 put there."""
    from deepspeed import zero  # noqa: PLC0415 - only when there is such a parameter

    return cast("ContextManager[Any]", zero.GatheredParameters(parameter, modifier_rank=0))
