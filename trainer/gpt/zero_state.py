"""Where DeepSpeed 0.19 keeps the fp32 weights of each parameter, and what its optimizer knows of them.

=====  =================================================================================================================
stage
=====  =================================================================================================================
0      whole on every rank: in fp32 the parameter itself, else FP16_UnfusedOptimizer's ``fp32_groups``
1, 2   ``single_partition_of_fp32_groups``: a flat share of each group; ``_hp_mapping`` of a parameter says which part
       of it lies there (deepspeed/utils/tensor_fragment.py)
3      ``fp32_partitioned_groups_flat``: every parameter is cut in equal parts, of which ``grad_position`` says where it
       lies (deepspeed/runtime/zero/stage3.py)
=====  =================================================================================================================
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple

import torch
from torch import nn

from trainer.gpt.pieces import KINDS, Piece, Reader
from trainer.gpt.ranks import Ranks

Names = Dict[nn.Parameter, str]


class Part(NamedTuple):
    """A piece, and where it lies: ``holder`` is the tensor that the optimizer knows."""

    piece: Piece
    holder: Any
    offset: int
    number: int  # of the parameter

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of the piece in the holder, or in a tensor like it; flat."""
        return tensor.view(-1)[self.offset : self.offset + self.piece.numel]


def inner(optimizer: Any) -> Any:
    """The optimizer that does the arithmetic."""
    return getattr(optimizer, "optimizer", optimizer)


def parts(optimizer: Any, names: Names, stage: int, rank: int) -> List[Part]:
    """What this rank holds of each parameter."""
    numbers = {name: index for index, name in enumerate(names.values())}
    found = {0: _whole, 1: _shares, 2: _shares, 3: _cut}[stage](optimizer, names, rank)
    return [Part(piece, holder, offset, numbers[piece.name]) for piece, holder, offset in found]


def _whole(optimizer: Any, names: Names, _: int) -> Iterator[Any]:
    if hasattr(optimizer, "fp32_groups"):
        low = [parameter for group in optimizer.fp16_groups for parameter in group]
        high = [master for group in optimizer.fp32_groups for master in group]
        masters = {parameter: high[index] for index, parameter in enumerate(low)}
    else:
        masters = {parameter: parameter for parameter in names}
    for parameter, name in names.items():
        yield Piece(name, 0, parameter.numel()), masters[parameter], 0


def _shares(optimizer: Any, names: Names, _: int) -> Iterator[Any]:
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        for parameter in optimizer.bit16_groups[index]:
            found = parameter._hp_mapping  # noqa: SLF001 - DeepSpeed's universal checkpoints read it as well
            if found is not None:
                place = found.lp_fragment_address
                yield Piece(names[parameter], place.start, place.numel), flat, found.hp_fragment_address.start


def _cut(optimizer: Any, names: Names, rank: int) -> Iterator[Any]:
    for parameter, name in names.items():
        group, offset, each = optimizer.grad_position[optimizer.get_param_id(parameter)]
        numel = min(each, parameter.ds_numel - rank * each)  # type: ignore[attr-defined]
        if numel > 0:
            yield Piece(name, rank * each, numel), optimizer.fp32_partitioned_groups_flat[group], offset


def is_written(part: Part, stage: int, ranks: Ranks) -> bool:
    """Whether this rank writes it: what all have is written by one."""
    return stage > 0 or part.number % ranks.world == ranks.rank


def start(optimizer: Any, held: List[Part]) -> None:
    """Make the state that AdamW would make in its first step, so that a checkpoint can be read into it."""
    counts = type(optimizer).__name__ == "DeepSpeedCPUAdam"  # its steps are plain numbers
    for part in held:
        state = optimizer.state[part.holder]
        for kind in KINDS[1:]:
            if kind not in state:
                state[kind] = torch.zeros_like(part.holder.data)
        if "step" not in state:
            on = part.holder.device if optimizer.defaults.get("fused") else "cpu"
            state["step"] = 0 if counts else torch.zeros((), device=on)
    count(optimizer, held, 0)


def count(optimizer: Any, held: List[Part], updates: int) -> None:
    """Set how many updates there have been."""
    for part in held:
        state = optimizer.state[part.holder]
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(updates)
        else:
            state["step"] = updates


def spread(names: Names, ranks: Ranks, reader: Reader) -> None:
    """Put a checkpoint's weights where they are computed with; in 16 bits these are copies."""
    for parameter, name in names.items():
        local = getattr(parameter, "ds_tensor", None)
        if local is None:
            parameter.data.copy_(reader.read("weight", name, 0, parameter.numel()).view(parameter.shape))
            continue
        total = parameter.ds_numel  # type: ignore[attr-defined]
        first = ranks.rank * local.numel()
        numel = min(local.numel(), total - first)
        if numel > 0:
            local.data.view(-1)[:numel].copy_(reader.read("weight", name, first, numel))
        if parameter.numel() == total:  # small ones stay whole on every rank
            parameter.data.copy_(reader.read("weight", name, 0, total).view(parameter.shape))
