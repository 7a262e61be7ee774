"""The optimizers of the engine with torch alone. They update this rank's share of each bucket (``engine.Bucket``).

``adamw``: torch's, with averages in fp32. ``adamw-bf16`` keeps them in 16 bits, rounded to nearest: with a ``beta2``
above 0.99 its changes are smaller than this rounding, so that average stops moving. ``adamw8bit`` keeps them in 8 bits
with a scale for each 128 numbers (arXiv 2110.02861). ``muon`` (arXiv 2502.16982): torch's, for the layers' matrices.

Bytes per parameter, weights included: 12, 8, 6, and 8 for the matrices of muon.

Checkpoints store averages in fp32, whatever the optimizer. So a training can be resumed by another AdamW, and the same
optimizer resumes exactly. This is why ``adamw8bit`` is not torchao's or bitsandbytes': they cannot represent a block's
largest number if it is negative, so their 8 bits change when they are read and packed again.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Protocol, Sequence, Tuple

import torch
from torch import nn

from trainer.lm.config import Config
from trainer.lm.errors import RefusedError
from trainer.lm.shape import Shape

if TYPE_CHECKING:
    from trainer.lm.engine import Bucket

AVERAGES = ("exp_avg", "exp_avg_sq")
BLOCK = 128  # numbers with one scale; pieces of checkpoints start at multiples of it
_CHUNK = 1 << 24  # numbers that are fp32 at a time


class Optimizer(Protocol):
    """Updates the weights of buckets from their gradients."""

    def step(self, rate: float) -> None:
        """Update the weights."""

    def read(self, bucket: Bucket, kind: str, start: int, numel: int) -> torch.Tensor:
        """Return some of a bucket's averages of one of ``AVERAGES``, as they are stored."""

    def write(self, bucket: Bucket, kind: str, start: int, values: torch.Tensor) -> None:
        """Set some of a bucket's averages."""

    def set_updates(self, updates: int) -> None:
        """Set the number of updates so far."""


def make(config: Config, buckets: Sequence[Bucket], shape: Shape, world: int) -> Optimizer:
    """Create the configured optimizer.

    Raises:
        RefusedError: Muon with several ranks, whose shares would cut through matrices.
    """
    if config.optimizer == "muon":
        if world > 1:
            what = "--optimizer muon needs whole matrices on one rank, not %d ranks" % world
            raise RefusedError(what, "--optimizer adamw, or one rank")
        return Muon(config, buckets, shape)
    if config.optimizer == "adamw":
        return AdamW(config, buckets)
    return SmallAdamW(config, buckets)


class AdamW:
    """torch's AdamW; see ``Optimizer``."""

    def __init__(self, config: Config, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        groups = [
            {"params": [bucket.weight], "weight_decay": config.weight_decay if bucket.decays else 0.0}
            for bucket in buckets
        ]
        for bucket in buckets:
            bucket.weight.grad = bucket.mine(bucket.gradient)
        betas = (config.beta1, config.beta2)
        self._adam = torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=True)
        for bucket in buckets:
            averages = {kind: torch.zeros_like(bucket.weight) for kind in AVERAGES}
            self._adam.state[bucket.weight] = dict(averages, step=torch.zeros((), device=bucket.weight.device))

    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    def read(self, bucket: Bucket, kind: str, start: int, numel: int) -> torch.Tensor:
        """See ``Optimizer``."""
        state: Dict[str, torch.Tensor] = self._adam.state[bucket.weight]
        return state[kind][start : start + numel]

    def write(self, bucket: Bucket, kind: str, start: int, values: torch.Tensor) -> None:
        """See ``Optimizer``."""
        self.read(bucket, kind, start, values.numel()).copy_(values)

    def set_updates(self, updates: int) -> None:
        """See ``Optimizer``."""
        for bucket in self._buckets:
            self._adam.state[bucket.weight]["step"].fill_(updates)


class Bits16:
    """Numbers in bf16."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._held = torch.zeros(numel, dtype=torch.bfloat16, device=device)

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Return some numbers in fp32."""
        return self._held[start : start + numel].float()

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set some numbers."""
        self._held[start : start + values.numel()].copy_(values)


@lru_cache(maxsize=4)
def levels(is_signed: bool, device: torch.device) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the 256 values between -1 (or 0) and 1 that 8 bits stand for, and the borders between them.

    The values of bitsandbytes' dynamic map, except for the lowest signed one: -1 instead of -0.993.
    """
    found = [0.0, 1.0]
    for power in range(7):
        count = 2**power if is_signed else 2 ** (power + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = (10.0 ** (power - 6) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += middles
        if is_signed:
            found += [-each for each in middles]
    values = sorted(found)
    if is_signed:
        values[0] = -1.0
    table = torch.tensor(values, dtype=torch.float64).float()
    return table.to(device), ((table[:-1] + table[1:]) / 2).to(device)


class Bits8:
    """Numbers in 8 bits, with a scale for each block. ``is_square``: their square roots are stored, never as 0.

    What is read and written again stays the same, because each block's largest number is exact.
    """

    def __init__(self, numel: int, device: torch.device, is_square: bool) -> None:
        self._is_square = is_square
        self._values, self._borders = levels(not is_square, device)
        zero = int((self._values == 0).nonzero().item())
        self._codes = torch.full((numel // BLOCK, BLOCK), zero, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(numel // BLOCK, 1, device=device)

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Return some numbers in fp32, from the start of a block."""
        blocks = slice(start // BLOCK, -(-(start + numel) // BLOCK))
        found = self._values[self._codes[blocks].int()] * self._scales[blocks]
        found = found.view(-1)[:numel]
        return found.square() if self._is_square else found

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set some numbers, from the start of a block to the end of one, or to a parameter's end."""
        blocks = slice(start // BLOCK, -(-(start + values.numel()) // BLOCK))
        held = values.new_zeros(self._codes[blocks].shape)
        held.view(-1)[: values.numel()] = values.sqrt() if self._is_square else values
        scales = held.abs().amax(dim=1, keepdim=True)
        codes = torch.bucketize(held / scales.clamp(min=torch.finfo(torch.float32).tiny), self._borders)
        if self._is_square:  # a zero would divide by epsilon only
            codes = torch.where(held > 0, codes.clamp(min=1), codes)
        self._codes[blocks] = codes.to(torch.uint8)
        self._scales[blocks] = scales


class SmallAdamW:
    """AdamW with averages in 16 or 8 bits; see ``Optimizer``."""

    def __init__(self, config: Config, buckets: Sequence[Bucket]) -> None:
        self._config = config
        self._buckets = buckets
        self._updates = 0
        self._held: List[Mapping[str, Any]] = []
        for bucket in buckets:
            size = (bucket.weight.numel(), bucket.weight.device)
            if config.optimizer == "adamw8bit":
                self._held.append({kind: Bits8(*size, is_square=kind == AVERAGES[1]) for kind in AVERAGES})
            else:
                self._held.append({kind: Bits16(*size) for kind in AVERAGES})
        self._of = {id(bucket): held for bucket, held in zip(buckets, self._held)}  # noqa: B905 - one for each

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        self._updates += 1
        for bucket in self._buckets:
            gradient = bucket.mine(bucket.gradient)
            for start in range(0, bucket.weight.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                self._update(bucket, bucket.weight[part], gradient[part], start, rate)

    def _update(self, bucket: Bucket, weight: torch.Tensor, gradient: torch.Tensor, start: int, rate: float) -> None:
        config, held = self._config, self._of[id(bucket)]
        first, second = (held[kind].read(start, weight.numel()) for kind in AVERAGES)
        first.lerp_(gradient, 1 - config.beta1)
        second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        for kind, average in zip(AVERAGES, (first, second)):  # noqa: B905 - two each
            held[kind].write(start, average)
        if bucket.decays:
            weight.mul_(1 - rate * config.weight_decay)
        unbiased = (1 - config.beta1**self._updates, math.sqrt(1 - config.beta2**self._updates))
        weight.addcdiv_(first, (second.sqrt_() / unbiased[1]).add_(config.epsilon), value=-rate / unbiased[0])

    def read(self, bucket: Bucket, kind: str, start: int, numel: int) -> torch.Tensor:
        """See ``Optimizer``."""
        found: torch.Tensor = self._of[id(bucket)][kind].read(start, numel)
        return found

    def write(self, bucket: Bucket, kind: str, start: int, values: torch.Tensor) -> None:
        """See ``Optimizer``."""
        self._of[id(bucket)][kind].write(start, values)

    def set_updates(self, updates: int) -> None:
        """See ``Optimizer``."""
        self._updates = updates


def is_hidden(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon updates a parameter: the matrices of the layers."""
    return name.startswith("layers.") and parameter.dim() > 1


def matrices(shape: Shape, name: str, rows: int) -> List[Tuple[int, int]]:
    """Return the first row and the rows of each matrix that one of ours joins: Muon treats them one by one."""
    sizes = [rows]
    if name.endswith("attention.qkv.weight"):
        sizes = [shape.n_head * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head]
    elif name.endswith("mlp.up.weight") and not shape.is_gpt2:
        sizes = [shape.inner, shape.inner]
    return [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]


class Muon:
    """torch's Muon for the matrices of the layers, AdamW for the rest; see ``Optimizer``.

    Its steps are scaled to the size of AdamW's, so one learning rate and one weight decay suit both.
    """

    def __init__(self, config: Config, buckets: Sequence[Bucket], shape: Shape) -> None:
        hidden = [bucket for bucket in buckets if all(is_hidden(slot.name, slot.parameter) for slot in bucket.slots)]
        self._adam = AdamW(config, [bucket for bucket in buckets if bucket not in hidden])
        self._momentum = {id(bucket): torch.zeros_like(bucket.weight) for bucket in hidden}
        found: List[Tuple[nn.Parameter, torch.Tensor]] = []
        for bucket in hidden:
            for slot in bucket.slots:
                whole = slice(slot.start, slot.start + slot.numel)
                size = slot.parameter.shape
                held = (bucket.weight, bucket.gradient, self._momentum[id(bucket)])
                weight, gradient, momentum = (each[whole].view(size) for each in held)
                for start, rows in matrices(shape, slot.name, size[0]):
                    part = slice(start, start + rows)
                    parameter = nn.Parameter(weight[part])  # a view: Muon updates the bucket
                    parameter.grad = gradient[part]
                    found.append((parameter, momentum[part]))
        parameters = [parameter for parameter, _ in found]
        more = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self._muon = torch.optim.Muon(parameters, config.learning_rate, **more)
        for parameter, momentum in found:
            self._muon.state[parameter]["momentum_buffer"] = momentum

    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        for group in self._muon.param_groups:
            group["lr"] = rate
        self._muon.step()
        self._adam.step(rate)

    def read(self, bucket: Bucket, kind: str, start: int, numel: int) -> torch.Tensor:
        """See ``Optimizer``. Muon has no second average: zeros."""
        momentum = self._momentum.get(id(bucket))
        if momentum is None:
            return self._adam.read(bucket, kind, start, numel)
        return momentum[start : start + numel] if kind == AVERAGES[0] else torch.zeros(numel)

    def write(self, bucket: Bucket, kind: str, start: int, values: torch.Tensor) -> None:
        """See ``Optimizer``."""
        if id(bucket) not in self._momentum:
            self._adam.write(bucket, kind, start, values)
        elif kind == AVERAGES[0]:
            self._momentum[id(bucket)][start : start + values.numel()].copy_(values)

    def set_updates(self, updates: int) -> None:
        """See ``Optimizer``."""
        self._adam.set_updates(updates)
