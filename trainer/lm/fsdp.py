"""Training with FSDP2 (``torch.distributed.fsdp.fully_shard``): weights, gradients and optimizer are sharded.

Each rank has a range of rows of every parameter, in fp32, and AdamW's averages for it. Before a layer's forward and
backward pass all ranks gather its weights in 16 bits, and free them afterwards. Gradients are reduced to their owners
in fp32 or bf16. The embedding of a tied model is also its output matrix, so embedding, last norm and output matrix
are gathered for the whole step.

The model is created without memory (torch's device ``meta``), sharded, and then filled parameter by parameter: it need
not fit on one device.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.lm import optimizers, parts
from trainer.lm.batch import Batch
from trainer.lm.checkpoint import FROZEN, KINDS, Piece, Reader
from trainer.lm.config import Config
from trainer.lm.engine import DTYPES, Scale, compile_layers, run
from trainer.lm.log import Watch
from trainer.lm.model import Decoder
from trainer.lm.ranks import Ranks


def shard(model: Decoder, config: Config, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard a model that was created on ``meta``, and allocate this rank's rows. They are not filled yet."""
    ranks.join_alone()
    on_gpu = ranks.device.type == "cuda"
    offloads = config.offload == "all"
    reduced = DTYPES[config.reduce_dtype]
    # Inputs stay as they are: the angles of rotary positions are fp32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    how: Dict[str, Any] = {
        "mesh": init_device_mesh(ranks.device.type, (ranks.world,)),
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offloads else OffloadPolicy(),
    }
    for module in (*model.blocks, *model.sections):
        fully_shard(module, **how)
    fully_shard(model, **how)
    model.to_empty(device=torch.device("cpu") if offloads else ranks.device)


def put(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Copy this rank's rows of a whole tensor into a sharded parameter."""
    start, mine = _rows(parameter)
    mine.copy_(tensor[start : start + len(mine)])


def _rows(tensor: torch.Tensor) -> Tuple[int, torch.Tensor]:
    """Return the first row of this rank's share, and the share. All ranks but the last ones have equally many rows."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    each = -(-len(tensor) // mesh.size())
    start = min(mesh.get_local_rank() * each, len(tensor))
    with torch.no_grad():
        mine = tensor.to_local()
    assert len(mine) == min(each, len(tensor) - start)
    return start, mine


class Rows:
    """A rank's rows of a parameter, as ``optimizers.Share``.

    FSDP may move them to other memory before the first step, so they are looked up each time.
    """

    def __init__(self, parameter: nn.Parameter, decays: bool, factor: float) -> None:
        self.parameter = parameter
        self.decays = decays
        self.factor = factor

    @property
    def weight(self) -> torch.Tensor:
        """The weights, flat."""
        return _rows(self.parameter)[1].view(-1)

    @property
    def reduced(self) -> Optional[torch.Tensor]:
        """Their gradients, flat; None: there are none."""
        gradient = self.parameter.grad
        return None if gradient is None else _rows(gradient)[1].view(-1)


class _AdamW:
    """torch's AdamW on sharded parameters; see ``optimizers.Optimizer``."""

    def __init__(self, config: Config, shares: Mapping[str, Rows]) -> None:
        self._parameters = {name: share.parameter for name, share in shares.items()}
        factors = {name: share.factor for name, share in shares.items()}
        groups = parts.groups(self._parameters, factors, config.weight_decay, lambda name: self._parameters[name].dim())
        betas = (config.beta1, config.beta2)
        self._adam = torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=True)
        for each in self._parameters.values():
            averages = {key: torch.zeros_like(each) for key in KINDS[1:]}
            self._adam.state[each] = dict(averages, step=torch.zeros((), device=each.device))

    def step(self, rate: float) -> None:
        """See ``Optimizer``."""
        for group in self._adam.param_groups:
            group["lr"] = rate * group["factor"]
        self._adam.step()

    def read(self, share: Rows, kind: str, start: int, numel: int) -> torch.Tensor:
        """See ``Optimizer``."""
        return _rows(self._adam.state[share.parameter][kind])[1].view(-1)[start : start + numel]

    def write(self, share: Rows, kind: str, start: int, values: torch.Tensor) -> None:
        """See ``Optimizer``."""
        self.read(share, kind, start, values.numel()).copy_(values)

    def set_updates(self, updates: int) -> None:
        """See ``Optimizer``."""
        for state in self._adam.state.values():
            state["step"].fill_(updates)


class Fsdp:
    """The engine of a model that ``shard`` has sharded; see ``Engine``."""

    name = "FSDP"

    def __init__(
        self, model: Decoder, config: Config, ranks: Ranks, micro_steps: int, dtype: torch.dtype, watch: Watch
    ) -> None:
        self.model = model
        self.scale = Scale(dtype == torch.float16)
        self.updates = 0
        self._ranks = ranks
        self._watch = watch
        self._micro_steps = micro_steps
        self._clip = config.grad_clip
        self._coalesces = config.coalesce
        self._sharded = dict(model.named_parameters())  # during a step modules have whole parameters instead
        self._shares = {
            name: Rows(self._sharded[name], self._sharded[name].dim() >= 2, factor)
            for name, factor in parts.factors(model, config).items()
        }
        if config.lora_rank:  # frozen weights are those of the base
            self._sharded = {name: self._sharded[name] for name in self._shares}
        self._optimizer: optimizers.Optimizer = _AdamW(config, self._shares)
        if config.optimizer != "adamw":
            self._optimizer = optimizers.SmallAdamW(config, list(self._shares.values()))

    def compile(self) -> None:
        """See ``Engine``. The hooks that gather weights cannot be compiled, so it compiles the layers between them."""
        compile_layers(self.model)

    def micro_step(self, batch: Batch, number: int) -> torch.Tensor:
        """See ``Engine``. Gradients are reduced in every micro-step, with ``coalesce`` only in the last one."""
        if self._coalesces:
            cast("FSDPModule", self.model).set_requires_gradient_sync(number == self._micro_steps - 1)
        with self._watch.part("forward"):
            loss = run(self.model, batch)
        with self._watch.part("backward"):
            (loss * self.scale.value if self.scale.is_used else loss).backward()
        return loss.detach()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        """See ``Engine``."""
        return run(self.model, batch)

    def step(self, rate: float) -> torch.Tensor:
        """See ``Engine``. The norm is that before clipping."""
        found = [each.reduced for each in self._shares.values()]
        mine = [each for each in found if each is not None and each.numel()]  # small parameters: a rank may have no row
        with self._watch.part("optimizer"):
            squares = torch.zeros((), device=self._ranks.device)
            if mine:
                norms = torch._foreach_norm(mine)  # noqa: SLF001 - what clip_grad_norm_ uses
                squares += torch.stack(norms).square().sum().to(squares.device)
            if self._ranks.world > 1:
                dist.all_reduce(squares)
        mean = 1.0 / (self._micro_steps * self.scale.value)  # they are already means over the ranks
        norm = squares.sqrt() * mean
        with self._watch.part("optimizer"):
            if self.scale.take(norm):
                factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) * mean if self._clip else norm.new_tensor(mean)
                if mine:
                    torch._foreach_mul_(mine, factor.to(mine[0].device))
                self._optimizer.step(rate)
                self.updates += 1
            for share in self._shares.values():
                share.parameter.grad = None
        return norm

    def pieces(self) -> List[Piece]:
        """See ``Engine``."""
        found = []
        for name, parameter in self._sharded.items():
            start, mine = _rows(parameter)
            kinds = KINDS if name in self._shares else FROZEN
            if mine.numel():
                found.append(Piece(name, start * (parameter.numel() // len(parameter)), mine.numel(), kinds))
        return found

    def tensors(self) -> Iterator[torch.Tensor]:
        """See ``Engine``."""
        for piece in self.pieces():
            yield _rows(self._sharded[piece.name])[1].view(-1)
            for kind in piece.kinds[1:]:
                yield self._optimizer.read(self._shares[piece.name], kind, 0, piece.numel)

    @torch.no_grad()
    def load(self, reader: Reader, updates: Optional[int]) -> None:
        """See ``Engine``."""
        for piece in self.pieces():
            mine = _rows(self._sharded[piece.name])[1].view(-1)
            mine.copy_(reader.piece(KINDS[0], piece))
            for kind in piece.kinds[1:] if updates is not None else ():
                read = reader.piece(kind, piece).to(mine.device)
                self._optimizer.write(self._shares[piece.name], kind, 0, read)
        self._optimizer.set_updates(updates or 0)
        self.updates = updates or 0
