"""The interface of the engines, their choice, and the default one. ``fsdp.py`` and ``zero.py`` are the others.

``Plain`` is data parallel with a sharded optimizer. On GPUs every rank computes with 16-bit weights. The fp32 weights
and AdamW's averages, 12 bytes per parameter, are sharded (ZeRO stage 1, arXiv 1910.02054). Each rank sums gradients in
fp32 over the micro-steps without communication. In the last micro-step each bucket of gradients is reduced to its owner
as soon as it is full. Each rank updates its share, then all gather the new weights. This sends fewer bytes than DDP's
all-reduce of fp32 gradients.

Why not torch's own classes: DistributedDataParallel computes under autocast, which casts all weights in every
micro-step, and updates all weights on every rank. ZeroRedundancyOptimizer does the same and sends weights one by one.
FSDP2 with sharded gradients gathers every layer in every micro-step, and its hooks prevent whole-model compilation.
"""

from __future__ import annotations

import math
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    cast,
)

import torch
import torch.distributed as dist
from torch import nn

from trainer.lm import optimizers, parts
from trainer.lm.batch import Batch
from trainer.lm.checkpoint import Piece, Reader
from trainer.lm.config import Config
from trainer.lm.errors import FailedError, RefusedError
from trainer.lm.log import Watch
from trainer.lm.loss import loss_and_gradient
from trainer.lm.model import Decoder, put
from trainer.lm.ranks import Ranks, all_gather, reduce_scatter
from trainer.lm.shape import Shape

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Engine(Protocol):
    """Trains a model. Every rank calls the same methods in the same order."""

    name: str
    model: nn.Module  # in training or evaluation mode
    scale: Scale
    updates: int  # of the optimizer

    def compile(self) -> None:
        """Compile the model as a whole."""

    def micro_step(self, batch: Batch, number: int) -> torch.Tensor:
        """Run the forward and backward pass of a step's micro-step ``number``. Return the loss, on the device."""

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch. A model that is compiled as a whole is not compiled again for evaluation."""

    def step(self, rate: float) -> torch.Tensor:
        """Update the weights, each part's with its factor of ``rate``. Return the gradient norm, on the device."""

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


def run(model: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return the loss of a batch."""
    count = torch.full((), batch.count, device=batch.tokens.device)  # a number would be compiled in
    more = {"images": batch.images, "positions": batch.positions}
    given = {name: each for name, each in more.items() if each is not None}
    return model(batch.tokens, batch.targets, None, batch.ends, count, **given)


def compile_for(config: Config, device: torch.device, shape: Shape) -> str:
    """Return how much of the model is compiled at a time."""
    if config.compile != "auto":
        return config.compile
    # ZeRO-3 gathers the weights of each matrix with hooks, which break a compiled model into small parts.
    if device.type != "cuda" or config.engine == "zero3":
        return "off"
    # A model as a whole takes minutes for little more speed; FSDP's hooks are between the layers.
    return "whole" if shape.is_gpt2 and config.engine != "fsdp" else "blocks"


class Creation(NamedTuple):
    """How a model is created: within ``context``, then ``shard`` is called; ``put`` copies a whole tensor into it.

    With ZeRO-3 and FSDP the whole model need not fit on one device.
    """

    context: ContextManager[Any]
    shard: Callable[[Decoder], None] = lambda _: None
    put: Callable[[nn.Parameter, torch.Tensor], None] = put


def creation(config: Config, ranks: Ranks, micro_steps: int) -> Creation:
    """Return how the configured engine's model is created.

    Raises:
        RefusedError: the engine is not available.
    """
    dtype = dtype_for(config, ranks.device)
    if config.engine == "fsdp":
        try:
            from trainer.lm import fsdp  # noqa: PLC0415 - torch's part for it takes a second to import
        except ImportError as error:
            what = "--engine fsdp needs torch 2.6 or later, not %s: %s" % (torch.__version__, error)
            raise RefusedError(what, "--engine plain") from error
        return Creation(torch.device("meta"), lambda model: fsdp.shard(model, config, ranks, dtype), fsdp.put)
    if config.engine == "zero3":
        from trainer.lm import zero  # noqa: PLC0415 - the other engines need no DeepSpeed

        return Creation(zero.creation_context(config, ranks, micro_steps, dtype), put=zero.put)
    return Creation(ranks.device)


def compile_layers(model: Decoder) -> None:
    """Compile each layer and the loss, separately. Hooks around a layer stay outside."""
    # The layers of a vision tower have the code of the decoder's. torch would take the sizes of the second kind for
    # ones that vary, whose kernels are slower.
    dynamic = False if len(model.blocks) > len(model.layers) else None
    for layer in model.blocks:
        layer.forward = torch.compile(layer.forward, dynamic=dynamic)  # type: ignore[method-assign]
    model.pieces = torch.compile(loss_and_gradient)


def make_engine(model: Decoder, config: Config, ranks: Ranks, micro_steps: int, watch: Watch) -> Engine:
    """Create the configured engine with a model that was created in its context.

    Raises:
        RefusedError: the engine is not available.
    """
    dtype = dtype_for(config, ranks.device)
    how = compile_for(config, ranks.device, model.shape)
    if how == "blocks":
        compile_layers(model)
    engine: Engine
    if config.engine == "plain":
        engine = Plain(model, config, ranks, micro_steps, dtype, watch)
    elif config.engine == "fsdp":
        from trainer.lm.fsdp import Fsdp  # noqa: PLC0415

        engine = Fsdp(model, config, ranks, micro_steps, dtype, watch)
    else:
        from trainer.lm.zero import Zero  # noqa: PLC0415

        engine = Zero(model, config, ranks, micro_steps, dtype, watch)
    if how == "whole":
        engine.compile()
    return engine


FIRST_SCALE = 2.0**16
SCALE_GROWTH = 1000  # updates without an overflow after which it doubles; DeepSpeed's loss_scale_window


class Scale:
    """``value`` is 1 if it is not used. All ranks see the same norms, so they have the same scale."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.value = FIRST_SCALE if is_used else 1.0
        self._good = 0

    def take(self, norm: torch.Tensor) -> bool:
        """Whether gradients of this norm can be used. Adapts the scale.

        Raises:
            FailedError: gradients overflow even at the smallest scale.
        """
        if not self.is_used:
            return True
        if math.isfinite(norm.item()):
            self._good += 1
            if self._good % SCALE_GROWTH == 0:
                self.value *= 2
            return True
        self._good = 0
        if self.value <= 1.0:
            raise FailedError(
                "Current loss scale already at minimum: fp16 gradients overflow without a scale",
                "use --dtype bfloat16 or float32, or a lower --learning-rate",
            )
        self.value /= 2
        return False


class Plain:
    """The engine without DeepSpeed; see ``Engine``."""

    name = "plain"

    def __init__(
        self, model: Decoder, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        self.model: nn.Module = model
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
        hidden_apart, factors = config.optimizer == "muon", parts.factors(model, config)
        self._buckets = make_buckets(model, ranks.rank, ranks.world, dtype, hidden_apart, factors)
        self._frozen = parts.Frozen(model, config, ranks)
        self._reduced: List[Any] = []
        self._first = self._last = False
        self._next = 0
        for bucket in self._buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
        self._optimizer = optimizers.make(config, self._buckets, model.shape)

    def compile(self) -> None:
        """See ``Engine``."""
        self.model.compile_whole()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See ``Engine``."""
        return cast("torch.Tensor", run(self.model, batch))

    def micro_step(self, batch: Batch, number: int) -> torch.Tensor:
        """See ``Engine``."""
        self._first, self._last = number == 0, number == self._micro_steps - 1
        if self._last:
            self._next = 0
            for bucket in self._buckets:
                bucket.left = len(bucket.slots)
        with self._watch.part("forward"):
            loss = run(self.model, batch)
        with self._watch.part("backward"):
            (loss * self.scale.value if self.scale.is_used else loss).backward()
        return loss.detach()

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[torch.Tensor], None]:
        """Add a gradient to the bucket as soon as it is computed, so that no second copy of all gradients exists."""
        into = bucket.gradient[slot.start : slot.start + slot.numel].view(slot.parameter.shape)

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
            assert self._next == len(self._buckets), "a trained parameter got no gradient in this step"
            mine = [bucket.reduced for bucket in self._buckets]
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
            self._optimizer.step(rate)
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
        return [piece for bucket in self._buckets for piece, _ in bucket.pieces()] + self._frozen.pieces()

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Engine``."""
        for bucket in self._buckets:
            for piece, at in bucket.pieces():
                yield bucket.weight[at : at + piece.numel]
                for kind in optimizers.AVERAGES:
                    yield self._optimizer.read(bucket, kind, at, piece.numel)
        yield from map(self._frozen.numbers, self._frozen.pieces())

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        kinds = optimizers.AVERAGES if updates is not None else ()
        for bucket in self._buckets:
            for piece, at in bucket.pieces():
                bucket.weight[at : at + piece.numel] = reader.piece("weight", piece).to(bucket.weight.device)
                for kind in kinds:
                    self._optimizer.write(bucket, kind, at, reader.piece(kind, piece).to(bucket.weight.device))
        self._frozen.load(reader)
        self._optimizer.set_updates(updates or 0)
        self.updates = updates or 0
        self._gather()


ALIGN = 128  # numbers: 256 bytes in 16 bits
BUCKET_SIZE = 64 << 20  # numbers per bucket


class Slot(NamedTuple):
    """Position of a parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    numel: int


class Bucket:
    """``flat``: the weights used in computation; ``gradient``: fp32 sums; ``weight``: this rank's share in fp32.

    In fp32 the share is a view of ``flat``. Otherwise it is a copy with the bits that ``flat`` lacks.
    ``factor``: what the learning rate is multiplied by.
    """

    def __init__(
        self, slots: Sequence[Slot], share: slice, numel: int, dtype: torch.dtype, decays: bool, factor: float
    ) -> None:
        self.slots = slots
        self.decays = decays
        self.factor = factor
        self.start, self.stop = share.start, share.stop
        device = slots[0].parameter.device
        whole = torch.zeros(numel, device=device)
        for slot in slots:
            whole[slot.start : slot.start + slot.numel] = slot.parameter.detach().float().view(-1)
        self.flat = whole if dtype == torch.float32 else whole.to(dtype)
        self.weight = self.mine(self.flat) if dtype == torch.float32 else self.mine(whole).clone()
        self.gradient = torch.zeros(numel, device=device)
        for slot in slots:
            slot.parameter.data = self.flat[slot.start : slot.start + slot.numel].view(slot.parameter.shape)
        self.left = 0  # gradients that have not arrived yet

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a buffer."""
        return flat[self.start : self.stop]

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's share of the gradients, after the last micro-step."""
        return self.mine(self.gradient)

    def pieces(self) -> Iterator[Tuple[Piece, int]]:
        """Yield the pieces that this rank owns and their offsets in its share."""
        for slot in self.slots:
            first = max(slot.start, self.start)
            last = min(slot.start + slot.numel, self.stop)
            if first < last:
                yield Piece(slot.name, first - slot.start, last - first), first - self.start


def make_buckets(
    model: nn.Module,
    rank: int,
    world: int,
    dtype: torch.dtype,
    hidden_apart: bool = False,
    factors: Mapping[str, float] = {},
) -> List[Bucket]:
    """Put a model's trained fp32 parameters into buckets.

    ``hidden_apart``: those of Muon into separate ones, in which each rank's share has whole matrices.
    ``factors``: of the learning rate, by name; 1 if it is not there.
    """
    buckets: List[Bucket] = []
    named = [each for each in model.named_parameters() if each[1].requires_grad][::-1]
    hidden = {name for name, parameter in named if hidden_apart and optimizers.is_hidden(name, parameter)}
    kinds: Dict[Tuple[bool, bool, float], List[Any]] = {}
    for name, parameter in named:
        kinds.setdefault((name in hidden, parameter.dim() >= 2, factors.get(name, 1.0)), []).append((name, parameter))
    for (is_hidden, decays, factor), chosen in sorted(kinds.items(), key=lambda each: each[0], reverse=True):
        for slots, each in _whole_slots(chosen, world) if is_hidden else _slots(chosen, world):
            share = slice(rank * each, (rank + 1) * each)
            buckets.append(Bucket(slots, share, each * world, dtype, decays, factor))
    return buckets


def _aligned(numel: int) -> int:
    return -(-numel // ALIGN) * ALIGN


def _slots(named: Sequence[Any], world: int) -> Iterator[Tuple[List[Slot], int]]:
    """Yield the slots of each bucket, one after the other, and the numbers of a rank's share."""
    slots: List[Slot] = []
    start = 0
    for name, parameter in named:
        if slots and start + parameter.numel() > BUCKET_SIZE:
            yield slots, _aligned(-(-start // world))
            slots, start = [], 0
        slots.append(Slot(name, parameter, start, parameter.numel()))
        start += _aligned(parameter.numel())
    yield slots, _aligned(-(-start // world))


def _whole_slots(named: Sequence[Any], world: int) -> Iterator[Tuple[List[Slot], int]]:
    """Yield the slots of each bucket, and the numbers of a rank's share: it has whole matrices.

    The largest matrices are placed first, each on the rank that has the fewest numbers. A bucket has several times as
    many numbers for each rank as the largest matrix, so the shares are nearly full.
    """
    whole = sum(parameter.numel() for _, parameter in named)
    most = world * max(BUCKET_SIZE, 4 * max(parameter.numel() for _, parameter in named))
    size = whole / -(-whole // most)  # equally many numbers in each bucket
    groups: Dict[int, List[Any]] = {}
    seen = 0
    for each in named:
        groups.setdefault(int(seen / size), []).append(each)
        seen += each[1].numel()
    for group in groups.values():
        loads = [0] * world
        placed = []
        for name, parameter in sorted(group, key=lambda each: each[1].numel(), reverse=True):
            rank = loads.index(min(loads))
            placed.append((name, parameter, rank, loads[rank]))
            loads[rank] += _aligned(parameter.numel())
        share = max(loads)
        yield [Slot(name, held, rank * share + at, held.numel()) for name, held, rank, at in placed], share
