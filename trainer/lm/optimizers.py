"""The optimizers of the engines ``plain`` and ``fsdp``. They update this rank's share of the weights.

The shares are those of buckets (``engine.Bucket``), or with FSDP a rank's rows of each parameter (``fsdp.Rows``).

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
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple, Type, Union

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from trainer.lm.config import Config
from trainer.lm.shape import Shape

if TYPE_CHECKING:
    from trainer.lm.engine import Bucket

AVERAGES = ("exp_avg", "exp_avg_sq")
BLOCK = 128  # numbers with one scale; pieces of checkpoints start at multiples of it
_CHUNK = 1 << 17  # blocks that are fp32 at a time
_TINY = torch.finfo(torch.float32).tiny


class Share(Protocol):
    """Weights that a rank updates: flat, in fp32. ``factor``: what the learning rate is multiplied by."""

    decays: bool
    factor: float

    @property
    def weight(self) -> torch.Tensor:
        """The weights."""

    @property
    def reduced(self) -> Optional[torch.Tensor]:
        """Their gradients, after the last micro-step; None: there are none."""


class Optimizer(Protocol):
    """Updates the weights of shares from their gradients."""

    def step(self, rate: float) -> None:
        """Update the weights."""

    def read(self, share: Any, kind: str, start: int, numel: int) -> torch.Tensor:
        """Return some of a share's averages of one of ``AVERAGES``, as they are stored."""

    def write(self, share: Any, kind: str, start: int, values: torch.Tensor) -> None:
        """Set some of a share's averages."""

    def set_updates(self, updates: int) -> None:
        """Set the number of updates so far."""


def make(config: Config, buckets: Sequence[Bucket], shape: Shape) -> Optimizer:
    """Create the configured optimizer."""
    if config.optimizer == "muon":
        return Muon(config, buckets, shape)
    if config.optimizer == "adamw":
        return AdamW(config, buckets)
    return SmallAdamW(config, buckets)


class AdamW:
    """torch's AdamW; see ``Optimizer``."""

    def __init__(self, config: Config, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        groups = [
            {
                "params": [bucket.weight],
                "weight_decay": config.weight_decay if bucket.decays else 0.0,
                "factor": bucket.factor,
            }
            for bucket in buckets
        ]
        for bucket in buckets:
            bucket.weight.grad = bucket.reduced
        betas = (config.beta1, config.beta2)
        self._adam = torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=True)
        for bucket in buckets:
            averages = {kind: torch.zeros_like(bucket.weight) for kind in AVERAGES}
            self._adam.state[bucket.weight] = dict(averages, step=torch.zeros((), device=bucket.weight.device))

    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
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


Held = Tuple[torch.Tensor, ...]  # averages as they are stored, in rows of a block


class Bits16:
    """Numbers in bf16."""

    @staticmethod
    def empty(blocks: int, device: torch.device, is_square: bool) -> Held:
        """Return zeros."""
        del is_square
        return (torch.zeros(blocks, BLOCK, dtype=torch.bfloat16, device=device),)

    @staticmethod
    def unpack(held: Held, is_square: bool) -> torch.Tensor:
        """Return the numbers in fp32, (blocks, BLOCK)."""
        del is_square
        return held[0].float()

    @staticmethod
    def pack(numbers: torch.Tensor, held: Held, is_square: bool) -> None:
        """Store numbers."""
        del is_square
        held[0].copy_(numbers)


class Bits8:
    """Numbers in 8 bits, with a scale for each block. Of squares the roots are stored, and never as 0.

    What is unpacked and packed again stays the same, because each block's largest number is exact.
    """

    @staticmethod
    def empty(blocks: int, device: torch.device, is_square: bool) -> Held:
        """Return zeros: codes, scales, and the tables of ``levels``."""
        values, borders = levels(not is_square, device)
        zero = int((values == 0).nonzero().item())
        codes = torch.full((blocks, BLOCK), zero, dtype=torch.uint8, device=device)
        return codes, torch.zeros(blocks, 1, device=device), values, borders

    @staticmethod
    def unpack(held: Held, is_square: bool) -> torch.Tensor:
        """Return the numbers in fp32, (blocks, BLOCK)."""
        codes, scales, values, _ = held
        found = values[codes.int()] * scales
        return found.square() if is_square else found

    @staticmethod
    def pack(numbers: torch.Tensor, held: Held, is_square: bool) -> None:
        """Store numbers."""
        codes, scales, _, borders = held
        kept = numbers.sqrt() if is_square else numbers
        largest = kept.abs().amax(dim=1, keepdim=True)
        found = torch.bucketize(kept / largest.clamp(min=_TINY), borders, out_int32=True)
        if is_square:  # a zero would divide by epsilon only
            found = torch.where(kept > 0, found.clamp(min=1), found)
        codes.copy_(found)
        scales.copy_(largest)


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


def update(
    bits: Type[Union[Bits16, Bits8]],
    weight: torch.Tensor,
    gradient: torch.Tensor,
    averages: Sequence[Held],
    betas: Tuple[float, float],
    factors: torch.Tensor,
) -> None:
    """Update weights, (blocks, BLOCK), and their averages by AdamW.

    ``factors``: what remains of the weights; the rate over the first average's bias; the root of the second's bias;
    epsilon.
    """
    first = bits.unpack(averages[0], is_square=False).lerp(gradient, 1 - betas[0])
    second = bits.unpack(averages[1], is_square=True) * betas[1] + (1 - betas[1]) * gradient.square()
    weight.copy_(weight * factors[0] - factors[1] * first / (second.sqrt() / factors[2] + factors[3]))
    bits.pack(first, averages[0], is_square=False)
    bits.pack(second, averages[1], is_square=True)


class SmallAdamW:
    """AdamW with averages in 16 or 8 bits; see ``Optimizer``."""

    def __init__(self, config: Config, shares: Sequence[Share]) -> None:
        self._config = config
        self._shares = shares
        self._updates = 0
        self._bits: Type[Union[Bits16, Bits8]] = Bits8 if config.optimizer == "adamw8bit" else Bits16
        self._held: Dict[int, List[Held]] = {}
        for share in shares:
            blocks = -(-share.weight.numel() // BLOCK)
            held = [self._bits.empty(blocks, share.weight.device, is_square) for is_square in (False, True)]
            self._held[id(share)] = held
        # One kernel instead of twenty; the number of blocks differs between shares.
        is_gpu = any(share.weight.is_cuda for share in shares)
        self._update: Callable[..., None] = torch.compile(update, dynamic=True) if is_gpu else update

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        self._updates += 1
        config = self._config
        unbiased = (1 - config.beta1**self._updates, math.sqrt(1 - config.beta2**self._updates))
        kinds = sorted({(share.decays, share.factor) for share in self._shares})
        numbers = [
            (1 - rate * times * config.weight_decay * decays, rate * times / unbiased[0], unbiased[1], config.epsilon)
            for decays, times in kinds
        ]
        factors = torch.tensor(numbers).to(self._shares[0].weight.device)
        for share in self._shares:
            mine = factors[kinds.index((share.decays, share.factor))]
            gradient = share.reduced
            if gradient is not None:
                self._update_share(share.weight, gradient, self._held[id(share)], mine)

    def _update_share(
        self, weight: torch.Tensor, gradient: torch.Tensor, held: Sequence[Held], factors: torch.Tensor
    ) -> None:
        betas = (self._config.beta1, self._config.beta2)
        whole = weight.numel() // BLOCK
        rest = weight.numel() - whole * BLOCK
        for start in range(0, whole, _CHUNK):
            part = slice(start, min(start + _CHUNK, whole))
            both = (each[part.start * BLOCK : part.stop * BLOCK].view(-1, BLOCK) for each in (weight, gradient))
            self._update(self._bits, *both, [_part(each, part) for each in held], betas, factors)
        if rest:  # of FSDP's rows; buckets are whole blocks
            padded = [F.pad(each[-rest:], (0, BLOCK - rest)).view(1, BLOCK) for each in (weight, gradient)]
            averages = [_part(each, slice(whole, whole + 1)) for each in held]
            self._update(self._bits, *padded, averages, betas, factors)
            weight[-rest:] = padded[0].view(-1)[:rest]

    def read(self, share: Share, kind: str, start: int, numel: int) -> torch.Tensor:
        """See ``Optimizer``."""
        number = AVERAGES.index(kind)
        held = _part(self._held[id(share)][number], _blocks(start, numel))
        return self._bits.unpack(held, number == 1).view(-1)[:numel]

    def write(self, share: Share, kind: str, start: int, values: torch.Tensor) -> None:
        """See ``Optimizer``. Beyond a parameter's end a block has zeros."""
        number = AVERAGES.index(kind)
        held = _part(self._held[id(share)][number], _blocks(start, values.numel()))
        whole = values.new_zeros(len(held[0]), BLOCK)
        whole.view(-1)[: values.numel()] = values
        self._bits.pack(whole, held, number == 1)

    def set_updates(self, updates: int) -> None:
        """See ``Optimizer``."""
        self._updates = updates


def _blocks(start: int, numel: int) -> slice:
    """Return the blocks of numbers; their first one starts a block."""
    return slice(start // BLOCK, -(-(start + numel) // BLOCK))


def _part(held: Held, blocks: slice) -> Held:
    """Return some blocks of stored averages, as views. The tables of 8 bits, if any, stay whole."""
    return (*(each[blocks] for each in held[:2]), *held[2:])


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

    Its steps are scaled to the size of AdamW's, so one learning rate and one weight decay suit both. Each rank updates
    the matrices in its share, which are whole.
    """

    def __init__(self, config: Config, buckets: Sequence[Bucket], shape: Shape) -> None:
        hidden = [bucket for bucket in buckets if all(is_hidden(slot.name, slot.parameter) for slot in bucket.slots)]
        self._adam = AdamW(config, [bucket for bucket in buckets if bucket not in hidden])
        self._momentum = {id(bucket): torch.zeros_like(bucket.weight) for bucket in hidden}
        found: List[Tuple[nn.Parameter, torch.Tensor]] = []
        groups: Dict[float, List[nn.Parameter]] = {}  # by the factor of their rate
        for bucket in hidden:
            at = {piece.name: start for piece, start in bucket.pieces()}
            for slot in bucket.slots:
                if slot.name not in at:
                    continue  # another rank's
                whole = slice(at[slot.name], at[slot.name] + slot.numel)
                size = slot.parameter.shape
                held = (bucket.weight, bucket.reduced, self._momentum[id(bucket)])
                weight, gradient, momentum = (each[whole].view(size) for each in held)
                for start, rows in matrices(shape, slot.name, size[0]):
                    part = slice(start, start + rows)
                    parameter = nn.Parameter(weight[part])  # a view: Muon updates the bucket
                    parameter.grad = gradient[part]
                    found.append((parameter, momentum[part]))
                    groups.setdefault(bucket.factor, []).append(parameter)
        params = [{"params": each, "factor": times} for times, each in groups.items()]
        more = {"weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        self._muon: Any = None
        if found:
            self._muon = torch.optim.Muon(params, config.learning_rate, **more)
        for parameter, momentum in found:
            self._muon.state[parameter]["momentum_buffer"] = momentum

    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        if self._muon:  # a rank may have no matrix
            for group in self._muon.param_groups:
                group["lr"] = rate * group["factor"]
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
