"""Flat buffers for the parameters of a model, cut so that every rank owns an equal share of each.

Parameters lie in the order in which the backward pass gives their gradients, roughly the reverse of the model's, so
that the first buckets can travel while it goes on. Matrices, which decay, and vectors, which do not, never share a
bucket. Each parameter begins at a multiple of ``ALIGN`` numbers, since matrix products want aligned operands.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch import nn

from trainer.gpt.pieces import Piece

ALIGN = 128  # numbers: 256 bytes in 16 bits
SIZE = 64 << 20  # numbers of a bucket


class Place(NamedTuple):
    """Where a parameter lies in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    numel: int


class Bucket:
    """``flat``: the weights that are computed with; ``gradient``: fp32 sums; ``weight``: this rank's fp32 share.

    In fp32 that share is a view of ``flat``, else a copy of its own that keeps the bits that ``flat`` has not.
    """

    def __init__(self, places: Sequence[Place], decays: bool, rank: int, world: int, dtype: torch.dtype) -> None:
        self.places = places
        self.decays = decays
        last = places[-1]
        each = -(-(last.start + last.numel) // (world * ALIGN)) * ALIGN
        self.start, self.stop = rank * each, (rank + 1) * each
        device = last.parameter.device
        whole = torch.zeros(each * world, device=device)
        for place in places:
            whole[place.start : place.start + place.numel] = place.parameter.detach().float().view(-1)
        self.flat = whole if dtype == torch.float32 else whole.to(dtype)
        self.weight = self.mine(self.flat) if dtype == torch.float32 else self.mine(whole).clone()
        self.gradient = torch.zeros(each * world, device=device)
        for place in places:
            place.parameter.data = self.flat[place.start : place.start + place.numel].view(place.parameter.shape)
        self.left = 0  # gradients that have not come yet

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's share of a buffer."""
        return flat[self.start : self.stop]

    def pieces(self) -> Iterator[Tuple[Piece, int]]:
        """What this rank owns, and where in its share that begins."""
        for place in self.places:
            first = max(place.start, self.start)
            last = min(place.start + place.numel, self.stop)
            if first < last:
                yield Piece(place.name, first - place.start, last - first), first - self.start


def make(model: nn.Module, rank: int, world: int, dtype: torch.dtype) -> List[Bucket]:
    """Put a model's parameters, which are fp32, into buckets."""
    made = []
    named = list(model.named_parameters())[::-1]
    for decays in (True, False):
        chosen = [(name, parameter) for name, parameter in named if (parameter.dim() >= 2) == decays]
        made += [Bucket(places, decays, rank, world, dtype) for places in _places(chosen)]
    return made


def _places(named: Sequence[Any]) -> Iterator[List[Place]]:
    places: List[Place] = []
    start = 0
    for name, parameter in named:
        if places and start + parameter.numel() > SIZE:
            yield places
            places, start = [], 0
        places.append(Place(name, parameter, start, parameter.numel()))
        start += -(-parameter.numel() // ALIGN) * ALIGN
    if places:
        yield places
