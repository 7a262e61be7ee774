"""One interface over torch alone (``plain.py``) and DeepSpeed's ZeRO (``zero.py``), and how one is made."""

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
    """What trains a model. Every rank calls the same methods in the same order."""

    name: str
    model: nn.Module  # whose mode says whether it is trained
    scale: Scale
    updates: int  # of the optimizer

    def compile(self) -> None:
        """Compile the model as a whole."""

    def micro_step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """Forward and backward of the micro-step of this number in its step; the loss, on the device."""

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a batch; a model that is compiled as a whole is not compiled again for this."""

    def step(self, rate: float) -> torch.Tensor:
        """Update the weights; the norm that the gradient had, on the device."""

    def pieces(self) -> List[Piece]:
        """What this rank writes into a checkpoint."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of ``pieces.entries(self.pieces())``."""

    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """Take the weights of a checkpoint; and its optimizer, unless ``updates`` is None."""


def dtype_for(config: Config, device: torch.device) -> torch.dtype:
    """What is computed in.

    Raises:
        RefusedError: bf16 on a GPU that only emulates it.
    """
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    if config.dtype == "bfloat16" and old:
        what = "--dtype bfloat16: %s has none in hardware" % torch.cuda.get_device_name(device)
        raise RefusedError(what, "--dtype float16, or auto")
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.float16 if old else torch.bfloat16


def compile_for(config: Config, device: torch.device) -> str:
    """How much of the model is compiled at a time."""
    if config.compile != "auto":
        return config.compile
    # ZeRO-3 fetches the weights of each layer by hooks, at which a compiled model falls apart.
    return "whole" if device.type == "cuda" and config.engine != "zero3" else "off"


def making(config: Config, ranks: Ranks, micro_steps: int) -> Tuple[ContextManager[Any], Whole]:
    """Where the engine wants a model to be made, and what makes a parameter whole so that it can be filled.

    ZeRO-3 cuts each parameter over the ranks when it is made: the whole model need not fit on the device of one.

    Raises:
        RefusedError: the engine cannot be had here.
    """
    if config.engine != "zero3":
        return ranks.device, nullcontext
    from trainer.gpt import zero_cut  # noqa: PLC0415 - only this one needs DeepSpeed

    return zero_cut.making(config, ranks, micro_steps, dtype_for(config, ranks.device)), zero_cut.whole


def make(model: GPT, config: Config, ranks: Ranks, micro_steps: int, watch: Watch) -> Engine:
    """The engine that was asked for, with a model that was made as it wants it.

    Raises:
        RefusedError: it cannot be had here.
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
