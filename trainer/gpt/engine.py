"""The interface of the engines, torch alone (``plain.py``) and DeepSpeed's ZeRO (``zero.py``), and their choice."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Protocol, Tuple

import torch
from torch import nn

from trainer.gpt.config import Config
from trainer.gpt.errors import RefusedError
from trainer.gpt.model import GPT
from trainer.gpt.pieces import Piece, Reader
from trainer.gpt.ranks import Ranks
from trainer.gpt.scaling import Scale
from trainer.gpt.timing import Watch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Whole = Callable[[nn.Parameter], ContextManager[Any]]


class Engine(Protocol):
    """Trains a model. Every rank calls the same methods in the same order."""

    name: str
    model: nn.Module  # in training or evaluation mode
    scale: Scale
    updates: int  # of the optimizer

    def compile(self) -> None:
        """Compile the model as a whole."""

    def micro_step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """Run the forward and backward pass of a step's micro-step ``number``. Return the loss, on the device."""

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch. A model that is compiled as a whole is not compiled again for evaluation."""

    def step(self, rate: float) -> torch.Tensor:
        """Update the weights. Return the gradient norm, on the device."""

    def pieces(self) -> List[Piece]:
        """Return the pieces that this rank writes into a checkpoint."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of ``entries(self.pieces())``."""

    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """Load the weights of a checkpoint, and its optimizer state unless ``updates`` is None."""


def dtype_for(config: Config, device: torch.device) -> torch.dtype:
    """Return the data type of the computation.

    Raises:
        RefusedError: bf16 on a GPU that only emulates it.
    """
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if config.dtype == "bfloat16" and old:
        what = "--dtype bfloat16: %s does not support it in hardware" % torch.cuda.get_device_name(device)
        raise RefusedError(what, "--dtype float16, or auto")
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.float16 if old else torch.bfloat16


def compile_for(config: Config, device: torch.device) -> str:
    """Return how much of the model is compiled at a time."""
    if config.compile != "auto":
        return config.compile
    # ZeRO-3 gathers the weights of each layer with hooks, which break a compiled model into small parts.
    return "whole" if device.type == "cuda" and config.engine != "zero3" else "off"


def making(config: Config, ranks: Ranks, micro_steps: int) -> Tuple[ContextManager[Any], Whole]:
    """Return the context in which to create a model, and the context that makes a parameter whole to fill it.

    ZeRO-3 shards each parameter at creation, so the whole model need not fit on one device.

    Raises:
        RefusedError: the engine is not available.
    """
    if config.engine != "zero3":
        return ranks.device, nullcontext
    from trainer.gpt import zero_cut  # noqa: PLC0415 - the other engines need no DeepSpeed

    return zero_cut.making(config, ranks, micro_steps, dtype_for(config, ranks.device)), zero_cut.whole


def make(model: GPT, config: Config, ranks: Ranks, micro_steps: int, watch: Watch) -> Engine:
    """Create the configured engine with a model that was created in its context.

    Raises:
        RefusedError: the engine is not available.
    """
    dtype = dtype_for(config, ranks.device)
    how = compile_for(config, ranks.device)
    if how == "blocks":
        for block in model.transformer["h"]:
            block.compile()
    engine: Engine
    if config.engine == "plain":
        from trainer.gpt.plain import Plain  # noqa: PLC0415 - only one of the two is needed

        engine = Plain(model, config, ranks, micro_steps, dtype, watch)
    else:
        from trainer.gpt.zero import Zero  # noqa: PLC0415

        engine = Zero(model, config, ranks, micro_steps, dtype, watch)
    if how == "whole":
        engine.compile()
    return engine
