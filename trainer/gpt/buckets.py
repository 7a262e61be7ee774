"""Flat buffers for a model's parameters. Every rank owns an equal share of each buffer.

Parameters are in the order in which the backward pass produces their gradients, roughly the reverse of the model's.
So the first buckets are sent while the backward pass continues. Matrices (with weight decay) and vectors (without) are
in separate buckets. Each parameter starts at a multiple of ``ALIGN`` numbers, because matrix products need alignment.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch import nn

from trainer.gpt.pieces import Piece

ALIGN = 128  # numbers: 256 bytes in 16 bits
SIZE = 64 << 20  # numbers per bucket


class Place(NamedTuple):
    """Position of a parameter in its bucket."""

    name: str
    parameter: nn.Parameter
    start: int
    numel: int


class Bucket:
    """``flat``: the weights used in computation; ``gradient``: fp32 sums; ``weight``: this rank's share in fp32.

    In fp32 the share is a view of ``flat``. Otherwise it is a copy with the bits that ``flat`` lacks.
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
        self.left = 0  # gradients that have not arrived yet

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a buffer."""
        return flat[self.start : self.stop]

    def pieces(self) -> Iterator[Tuple[Piece, int]]:
        """Yield the pieces that this rank owns and their offsets in its share."""
        for place in self.places:
            first = max(place.start, self.start)
            last = min(place.start + place.numel, self.stop)
            if first < last:
                yield Piece(place.name, first - place.start, last - first), first - self.start


def make(model: nn.Module, rank: int, world: int, dtype: torch.dtype) -> List[Bucket]:
    """Put a model's fp32 parameters into buckets."""
    buckets: List[Bucket] = []
    named = list(model.named_parameters())[::-1]
    for decays in (True, False):
        chosen = [(name, parameter) for name, parameter in named if (parameter.dim() >= 2) == decays]
        buckets += [Bucket(places, decays, rank, world, dtype) for places in _places(chosen)]
    return buckets


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
