"""Training with DeepSpeed: ZeRO stages 0 to 3, optimizer and parameters on the GPU or in the memory of the host.

Written for 0.19. What it keeps of each parameter is found through its optimizers (``zero_state.py``), so that
checkpoints have our own format: they are read by any number of ranks, any stage, and without DeepSpeed.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
from typing import Any, Callable, Iterator, List, Optional, cast

import torch
import torch.distributed as dist
from torch import nn

from trainer.gpt import zero_config, zero_state
from trainer.gpt.config import Config
from trainer.gpt.errors import FailedError, RefusedError
from trainer.gpt.model import GPT
from trainer.gpt.pieces import KINDS, Piece, Reader
from trainer.gpt.ranks import Ranks
from trainer.gpt.scaling import Scale
from trainer.gpt.timing import Watch


class Zero:
    """DeepSpeed as an engine; ``engine.py`` says what an engine is."""

    def __init__(
        self, model: GPT, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        if dtype == torch.float16 and ranks.device.type == "cpu":
            raise RefusedError("DeepSpeed computes fp16 on GPUs only", "--dtype bfloat16, or --engine plain")
        deepspeed = _library(ranks)
        stage = int(config.engine[-1])
        self.name = "ZeRO-%d" % stage
        self.scale: Any = Scale(is_used=False)
        self.updates = 0
        self._ranks = ranks
        self._watch = watch
        self._micro_steps = micro_steps
        self._model = model
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        made = zero_config.make(config, stage, micro_steps, dtype, ranks.device.type == "cuda")
        optimizer = _optimizer(model, config, ranks)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=made, dist_init_required=False)
        self._theirs = self._engine.optimizer
        self.model = cast("nn.Module", self._engine if stage == 3 else model)
        self.loss: Callable[..., torch.Tensor] = self._engine
        if dtype == torch.float16:
            self.scale = _TheirScale(self._theirs)
        self._tells_no_norm = stage == 0 and dtype == torch.float32
        self._parts = zero_state.parts(self._theirs, self._names, stage, ranks.rank)
        self._written = [part for part in self._parts if zero_state.is_written(part, stage, ranks)]
        zero_state.start(zero_state.inner(self._theirs), self._parts)

    def compile(self) -> None:
        """Compile the whole model where DeepSpeed calls it."""
        self._engine.compile()

    def micro_step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """See ``Engine``. From stage 2 on DeepSpeed reduces gradients in every micro-step, in the backward pass."""
        with self._watch.part("forward"):
            loss = self.loss(tokens, targets)
        with self._watch.part("backward"):
            self._engine.backward(loss)
        if number < self._micro_steps - 1:
            self._engine.step()  # only counts
        return loss.detach()

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See ``Engine``."""
        if self.model is self._engine:
            return cast("torch.Tensor", self._engine(tokens, targets))
        return self._model.forward(tokens, targets)

    def step(self, rate: float) -> torch.Tensor:
        """See ``Engine``.

        Raises:
            FailedError: fp16 overflows at the smallest loss scale too.
        """
        for group in self._theirs.param_groups:
            group["lr"] = rate
        before = self._engine.skipped_steps
        norm: Any = None
        if self._tells_no_norm:  # gradients of stage 0 are means already
            gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with self._watch.part("optimizer"):
            try:
                self._engine.step()
            except Exception as error:
                if "minimum" not in str(error):  # DeepSpeed raises a plain Exception for its loss scale
                    raise
                raise FailedError(str(error), "--dtype bfloat16 or float32, or a lower --learning-rate") from error
        if self._engine.skipped_steps > before:
            return torch.tensor(math.inf, device=self._ranks.device)
        self.updates += 1
        norm = self._engine.get_global_grad_norm() if norm is None else norm
        return torch.as_tensor(norm, device=self._ranks.device)

    def pieces(self) -> List[Piece]:
        """See ``Engine``."""
        return [part.piece for part in self._written]

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Engine``."""
        held = zero_state.inner(self._theirs).state
        for part in self._written:
            yield part.of(part.holder.data)
            for kind in KINDS[1:]:
                yield part.of(held[part.holder][kind])

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        held = zero_state.inner(self._theirs).state
        for part in self._parts:
            part.of(part.holder.data).copy_(reader.read("weight", *part.piece))
            for kind in KINDS[1:] if updates is not None else ():
                part.of(held[part.holder][kind]).copy_(reader.read(kind, *part.piece))
        zero_state.count(zero_state.inner(self._theirs), self._parts, updates or 0)
        zero_state.spread(self._names, self._ranks, reader)
        self.updates = updates or 0


class _TheirScale:
    """DeepSpeed's loss scale, as ``Scale`` is seen from outside."""

    is_used = True

    def __init__(self, optimizer: Any) -> None:
        self._holder = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config  # stage 0 has the latter

    @property
    def value(self) -> float:
        return float(self._holder.cur_scale)

    @value.setter
    def value(self, scale: float) -> None:
        self._holder.cur_scale = scale


def _library(ranks: Ranks) -> Any:
    """DeepSpeed, ready to be used by these ranks."""
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    try:
        import deepspeed  # noqa: PLC0415 - the plain engine needs none

        theirs = importlib.import_module("deepspeed.comm.torch")  # the attribute of this name is torch itself
    except ImportError as error:
        raise RefusedError("there is no DeepSpeed here: %s" % error, "--engine plain") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if ranks.device.type == "cpu":
        # It would compile an all-reduce over shared memory, for inference only, which most nodes cannot.
        theirs.build_shm_op = lambda: None  # type: ignore[attr-defined]
    if not dist.is_initialized():
        backend = "nccl" if ranks.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for name, value in (("RANK", ranks.rank), ("LOCAL_RANK", ranks.local), ("WORLD_SIZE", ranks.world)):
        os.environ.setdefault(name, str(value))  # it asks these, and without them MPI
    return deepspeed


def _optimizer(model: GPT, config: Config, ranks: Ranks) -> Any:
    """AdamW in the form that suits the place where its state lies.

    The rate is 0 until the first step: DeepSpeed makes some optimizers step once, without gradients, for their state.
    """
    named = list(model.parameters())
    matrices = [parameter for parameter in named if parameter.dim() >= 2]
    vectors = [parameter for parameter in named if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    if config.offload == "none" or ranks.device.type == "cpu":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=ranks.device.type == "cuda")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - it is compiled when it is made

    try:
        return DeepSpeedCPUAdam(groups, lr=0.0, betas=betas, eps=config.epsilon)
    except Exception as error:  # a compiler's failure has many types
        what = "DeepSpeed's optimizer for CPUs cannot be built here: %s" % str(error).strip().splitlines()[0]
        raise RefusedError(what, "clusterctl pack-env --with-ops, or --offload none") from error
