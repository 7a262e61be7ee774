"""Training with DeepSpeed: ZeRO stages 0 to 3, with optimizer and parameters on the GPU or in host memory.

Written for DeepSpeed 0.19. The engine finds the state of each parameter in DeepSpeed's optimizers and writes
checkpoints in our format. Any number of ranks, any stage, and the engine without DeepSpeed can read them.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterator, List, Optional, cast

import torch
from torch import nn

from trainer.gpt import zero_config, zero_cut, zero_library, zero_state
from trainer.gpt.config import Config
from trainer.gpt.errors import FailedError, RefusedError
from trainer.gpt.model import GPT, fill, sizes
from trainer.gpt.pieces import KINDS, Piece, Reader
from trainer.gpt.ranks import Ranks
from trainer.gpt.scaling import Scale
from trainer.gpt.timing import Watch


class Zero:
    """DeepSpeed as an engine; see ``Engine``."""

    def __init__(
        self, model: GPT, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        stage = int(config.engine[-1])
        settings = zero_config.make(config, stage, micro_steps, dtype, ranks.device.type == "cuda")
        deepspeed = zero_library.load(ranks)
        self.name = "ZeRO-%d" % stage
        self.scale: Any = Scale(is_used=False)
        self.updates = 0
        self._ranks = ranks
        self._watch = watch
        self._micro_steps = micro_steps
        self._model = model
        optimizer = _optimizer(model, config, ranks)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._theirs = self._engine.optimizer
        self._coalesces = config.coalesce and micro_steps > 1
        self._coalescing = contextlib.ExitStack()
        if self._coalesces:
            with zero_library.known():
                self._coalesce = self._engine.coalesce_grad_reduction
                self._engine.set_gradient_accumulation_boundary(is_boundary=True)  # one step() for all micro-steps
        self.model = cast("nn.Module", self._engine if stage == 3 else model)
        self._whole = zero_cut.whole if stage == 3 else contextlib.nullcontext
        self.loss: Callable[..., torch.Tensor] = self._engine
        if dtype == torch.float16:
            self.scale = _TheirScale(self._theirs)
        self._lacks_norm = stage == 0 and dtype == torch.float32
        self._parts = zero_state.parts(self._theirs, model, stage, ranks)
        self._written = (
            self._parts if stage else self._parts[ranks.rank :: ranks.world]
        )  # if all ranks hold a part, one writes it

    def compile(self) -> None:
        """Compile the whole model at the point where DeepSpeed calls it."""
        self._engine.compile()

    def micro_step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """See ``Engine``. From stage 2 on DeepSpeed reduces gradients in every micro-step, in the backward pass.

        With ``coalesce`` each rank sums its gradients, and they are reduced after the last micro-step.
        """
        is_last = number == self._micro_steps - 1
        if self._coalesces and number == 0:
            self._coalescing.enter_context(self._coalesce())
        with self._watch.part("forward"):
            loss = self.loss(tokens, targets)
        with self._watch.part("backward"):
            self._engine.backward(loss)
        if self._coalesces and is_last:
            with self._watch.part("communication"):
                self._coalescing.close()
        elif not self._coalesces and not is_last:
            self._engine.step()  # only counts micro-steps
        return loss.detach()

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See ``Engine``."""
        if self.model is self._engine:
            return cast("torch.Tensor", self._engine(tokens, targets))
        return self._model.forward(tokens, targets)

    def step(self, rate: float) -> torch.Tensor:
        """See ``Engine``.

        Raises:
            FailedError: fp16 overflows even at the smallest loss scale.
        """
        for group in self._theirs.param_groups:
            group["lr"] = rate
        before = self._engine.skipped_steps
        norm: Any = None
        if self._lacks_norm:  # in stage 0 gradients are already means
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        with self._watch.part("optimizer"):
            try:
                self._engine.step()
            except Exception as error:
                if "minimum" not in str(error):  # DeepSpeed raises a plain Exception for its loss scale
                    raise
                raise FailedError(str(error), "use --dtype bfloat16 or float32, or a lower --learning-rate") from error
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
        return (part.numbers(kind) for part in self._written for kind in KINDS)

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        for part in self._parts:
            for kind in KINDS if updates is not None else KINDS[:1]:
                part.numbers(kind).copy_(reader.read(kind, *part.piece))
            part.count(updates or 0)
        # The weights used in computation are copies of these parts, except in stage 0 with fp32.
        read = ((name, reader.whole(name, size)) for name, size in sizes(self._model.shape).items())
        fill(self._model, read, self._whole)
        self.updates = updates or 0


class _TheirScale:
    """DeepSpeed's loss scale, with the interface of ``Scale``."""

    is_used = True

    def __init__(self, optimizer: Any) -> None:
        with zero_library.known():  # stage 0 has a loss_scale_config
            self._holder = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
            self.value = self.value  # checks that it exists and can be set

    @property
    def value(self) -> float:
        return float(self._holder.cur_scale)

    @value.setter
    def value(self, scale: float) -> None:
        self._holder.cur_scale = scale


def _optimizer(model: GPT, config: Config, ranks: Ranks) -> Any:
    """Create AdamW in the form that suits the place of its state.

    The rate is 0 until the first step: DeepSpeed runs some optimizers once without gradients to create their state.
    """
    size = sizes(model.shape)  # in ZeRO-3 parameters have no shape
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if len(size[name]) >= 2]
    vectors = [parameter for name, parameter in named if len(size[name]) < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    if config.offload == "none" or ranks.device.type == "cpu":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=ranks.device.type == "cuda")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415 - it is compiled on first use

    try:
        return DeepSpeedCPUAdam(groups, lr=0.0, betas=betas, eps=config.epsilon)
    except Exception as error:  # a failed compilation raises many types
        what = "cannot build DeepSpeed's CPU optimizer: %s" % str(error).strip().splitlines()[0]
        raise RefusedError(
            what, "pack the environment with clusterctl pack-env --with-ops, or use --offload none"
        ) from error
