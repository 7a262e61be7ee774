"""Where DeepSpeed 0.19 stores the fp32 weights of each parameter and its optimizer state.

=====  =================================================================================================================
stage
=====  =================================================================================================================
0      whole on every rank: in fp32 the parameter itself, else FP16_UnfusedOptimizer's ``fp32_groups``
1, 2   ``single_partition_of_fp32_groups``: a flat share of each group; ``_hp_mapping`` of a parameter maps its part of
       the share (deepspeed/utils/tensor_fragment.py)
3      ``fp32_partitioned_groups_flat``: every parameter is split into equal parts, the last one shorter;
       ``grad_position`` has their offsets (deepspeed/runtime/zero/stage3.py)
=====  =================================================================================================================

No other module reads these fields. ``parts`` checks them before the first step, because other versions may differ.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import torch

from trainer.gpt import zero_library
from trainer.gpt.model import GPT, sizes
from trainer.gpt.pieces import KINDS, Piece
from trainer.gpt.ranks import Ranks

Found = Iterator[Tuple[Piece, Any, int]]  # with its tensor and the offset in it


class Part(NamedTuple):
    """A piece that this rank holds: in ``holder`` and the optimizer's state for it, starting at ``offset``."""

    piece: Piece
    holder: torch.Tensor
    state: Dict[str, Any]
    offset: int

    def numbers(self, kind: str) -> torch.Tensor:
        """A flat view of its numbers of one of ``KINDS``."""
        tensor = self.holder if kind == KINDS[0] else self.state[kind]
        return tensor.data.view(-1)[self.offset : self.offset + self.piece.numel]

    def count(self, updates: int) -> None:
        """Set the number of updates."""
        if isinstance(self.state["step"], torch.Tensor):
            self.state["step"].fill_(updates)
        else:
            self.state["step"] = updates


def parts(optimizer: Any, model: GPT, stage: int, ranks: Ranks) -> List[Part]:
    """Return this rank's parts of each parameter, in the model's order. In stage 0 all ranks hold all.

    Raises:
        RefusedError: this version of DeepSpeed stores them differently.
    """
    find = (_whole, _shares, _shares, _cut)[stage]
    adam = getattr(optimizer, "optimizer", optimizer)
    with zero_library.known():
        found = [
            Part(piece, holder, _state(adam, holder), offset)
            for piece, holder, offset in find(optimizer, model, ranks.rank)
        ]
        for part in found:
            if part.numbers(KINDS[0]).numel() != part.piece.numel:
                raise ValueError("%s is outside its tensor" % part.piece.name)
    mine = torch.tensor([sum(part.piece.numel for part in found)], dtype=torch.float64, device=ranks.device)
    held = ranks.gather(mine).sum().item()
    wanted = sum(size.numel() for size in sizes(model.shape).values()) * (1 if stage else ranks.world)
    with zero_library.known():
        if held != wanted:
            raise ValueError("all ranks together hold %d of %d weights" % (held, wanted))
    return found


def _whole(optimizer: Any, model: GPT, _: int) -> Found:
    named = dict(model.named_parameters())
    masters: Dict[Any, Any] = {parameter: parameter for parameter in named.values()}
    if any(parameter.dtype != torch.float32 for parameter in masters):
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups):  # noqa: B905 - both have the same groups
            masters.update(zip(low, high))  # noqa: B905
    for name, parameter in named.items():
        yield Piece(name, 0, parameter.numel()), masters[parameter], 0


def _shares(optimizer: Any, model: GPT, _: int) -> Found:
    for name, parameter in model.named_parameters():
        here: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # noqa: SLF001 - DeepSpeed's converters read it too
        if here is not None:
            piece = Piece(name, here.lp_fragment_address.start, here.lp_fragment_address.numel)
            flat = optimizer.single_partition_of_fp32_groups[here.param_group_index]
            yield piece, flat, here.hp_fragment_address.start


def _cut(optimizer: Any, model: GPT, rank: int) -> Found:
    size = sizes(model.shape)
    for name, parameter in model.named_parameters():
        group, offset, each = optimizer.grad_position[optimizer.get_param_id(parameter)]
        numel = min(each, size[name].numel() - rank * each)
        if numel > 0:
            yield Piece(name, rank * each, numel), optimizer.fp32_partitioned_groups_flat[group], offset


def _state(adam: Any, holder: Any) -> Dict[str, Any]:
    """Return AdamW's state of a tensor, created if needed, so that a checkpoint can be loaded into it."""
    state: Dict[str, Any] = adam.state[holder]
    for kind in KINDS[1:]:
        if kind not in state:
            state[kind] = torch.zeros_like(holder.data)
    if type(adam).__name__ == "DeepSpeedCPUAdam":  # its step is a plain number
        state["step"] = 0
    else:
        state["step"] = torch.zeros((), device=holder.device if adam.defaults.get("fused") else "cpu")
    return state
