"""Data parallel training with torch alone. The optimizer is sharded over the ranks.

On GPUs every rank computes with 16-bit weights. The fp32 weights and AdamW's averages, 12 bytes per parameter, are
sharded (ZeRO stage 1, arXiv 1910.02054). Each rank sums gradients in fp32 over the micro-steps without communication.
In the last micro-step each bucket of gradients is reduced to its owner as soon as it is full. Each rank updates its
share, then all gather the new weights. This sends fewer bytes than DDP's all-reduce of fp32 gradients.

Why not torch's own classes: DistributedDataParallel computes under autocast, which casts all weights in every
micro-step, and updates all weights on every rank. ZeroRedundancyOptimizer does the same and sends weights one by one.
FSDP2 with sharded gradients gathers every layer in every micro-step, and its hooks prevent whole-model compilation.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, cast

import torch
import torch.distributed as dist
from torch import nn

from trainer.gpt import buckets
from trainer.gpt.config import Config
from trainer.gpt.pieces import KINDS, Piece, Reader
from trainer.gpt.ranks import Ranks, all_gather, reduce_scatter
from trainer.gpt.scaling import Scale
from trainer.gpt.timing import Watch


class Plain:
    """The engine without DeepSpeed; see ``Engine``."""

    name = "plain"

    def __init__(
        self, model: nn.Module, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        self.model = model
        self.loss: Callable[..., torch.Tensor] = model
        self.scale = Scale(dtype == torch.float16)
        self.updates = 0
        self._ranks = ranks
        self._watch = watch
        self._micro_steps = micro_steps
        self._clip = config.grad_clip
        self._narrow = config.reduce_dtype == "bfloat16"
        if ranks.world > 1:  # all ranks draw the same weights, but types of GPUs may differ in a bit
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        self._buckets = buckets.make(model, ranks.rank, ranks.world, dtype)
        self._reduced: List[Any] = []
        self._first = self._last = False
        self._next = 0
        for bucket in self._buckets:
            for place in bucket.places:
                place.parameter.register_post_accumulate_grad_hook(self._hook(bucket, place))
        self._adam = self._make_optimizer(config)

    def _make_optimizer(self, config: Config) -> torch.optim.AdamW:
        groups = []
        for bucket in self._buckets:
            bucket.weight.grad = bucket.mine(bucket.gradient)
            groups.append({"params": [bucket.weight], "weight_decay": config.weight_decay if bucket.decays else 0.0})
        betas = (config.beta1, config.beta2)
        adam = torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=True)
        for bucket in self._buckets:
            averages = {key: torch.zeros_like(bucket.weight) for key in KINDS[1:]}
            adam.state[bucket.weight] = dict(averages, step=torch.zeros((), device=bucket.weight.device))
        return adam

    def compile(self) -> None:
        """See ``Engine``."""
        self.loss = torch.compile(self.model)

    def evaluate(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See ``Engine``."""
        return cast("torch.Tensor", self.model(tokens, targets))

    def micro_step(self, tokens: torch.Tensor, targets: torch.Tensor, number: int) -> torch.Tensor:
        """See ``Engine``."""
        self._first, self._last = number == 0, number == self._micro_steps - 1
        if self._last:
            self._next = 0
            for bucket in self._buckets:
                bucket.left = len(bucket.places)
        with self._watch.part("forward"):
            loss = self.loss(tokens, targets)
        with self._watch.part("backward"):
            (loss * self.scale.value if self.scale.is_used else loss).backward()
        return loss.detach()

    def _hook(self, bucket: buckets.Bucket, place: buckets.Place) -> Callable[[torch.Tensor], None]:
        """Add a gradient to the bucket as soon as it is computed, so that no second copy of all gradients exists."""
        into = bucket.gradient[place.start : place.start + place.numel].view(place.parameter.shape)

        def take(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if self._first:
                into.copy_(gradient)
            else:
                into.add_(gradient)
            parameter.grad = None
            if self._last:
                bucket.left -= 1
                self._send()

        return take

    def _send(self) -> None:
        """Start reducing the full buckets, on all ranks in the same order."""
        while self._next < len(self._buckets) and not self._buckets[self._next].left:
            bucket = self._buckets[self._next]
            self._next += 1
            if self._ranks.world == 1:
                continue
            whole = bucket.gradient.bfloat16() if self._narrow else bucket.gradient
            if self._ranks.device.type == "cuda":
                work = reduce_scatter(bucket.mine(whole), whole, async_op=True)
            else:  # gloo's reduce-scatter is no faster than its all-reduce
                work = dist.all_reduce(whole, async_op=True)
            self._reduced.append((bucket, whole, work))

    def step(self, rate: float) -> torch.Tensor:
        """See ``Engine``. The norm is that before clipping."""
        with self._watch.part("communication"):
            for bucket, whole, work in self._reduced:
                work.wait()
                if self._narrow:
                    bucket.mine(bucket.gradient).copy_(bucket.mine(whole))
            self._reduced.clear()
        with self._watch.part("optimizer"):
            mine = [bucket.mine(bucket.gradient) for bucket in self._buckets]
            squares = torch.stack(torch._foreach_norm(mine)).square().sum()  # noqa: SLF001 - what clip_grad_norm_ uses
        if self._ranks.world > 1:
            with self._watch.part("communication"):
                dist.all_reduce(squares)
        mean = 1.0 / (self._micro_steps * self._ranks.world * self.scale.value)
        norm = squares.sqrt() * mean
        if not self.scale.take(norm):
            return norm
        with self._watch.part("optimizer"):
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) * mean if self._clip else norm.new_tensor(mean)
            torch._foreach_mul_(mine, factor)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self.updates += 1
        self._gather()
        return norm

    def _gather(self) -> None:
        with self._watch.part("communication"):
            works = []
            for bucket in self._buckets:
                mine = bucket.mine(bucket.flat)
                if mine.data_ptr() != bucket.weight.data_ptr():
                    mine.copy_(bucket.weight)
                if self._ranks.world > 1:
                    works.append(all_gather(bucket.flat, mine, async_op=True))
            for work in works:
                work.wait()

    def pieces(self) -> List[Piece]:
        """See ``Engine``."""
        return [piece for bucket in self._buckets for piece, _ in bucket.pieces()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Engine``."""
        for bucket in self._buckets:
            state = self._adam.state[bucket.weight]
            for piece, at in bucket.pieces():
                for held in (bucket.weight, state["exp_avg"], state["exp_avg_sq"]):
                    yield held[at : at + piece.numel]

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        kinds = KINDS if updates is not None else KINDS[:1]
        for bucket in self._buckets:
            state = self._adam.state[bucket.weight]
            held = dict(state, weight=bucket.weight)
            for piece, at in bucket.pieces():
                for kind in kinds:
                    held[kind][at : at + piece.numel] = reader.read(kind, *piece).to(bucket.weight.device)
            state["step"].fill_(updates or 0)
        self.updates = updates or 0
        self._gather()
