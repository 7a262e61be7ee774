"""A vision tower: those of SigLIP, CLIP and Qwen2.5-VL in one model (``shape.Tower`` says what they differ in).

The patches of all images and tiles are in one line, as the tokens of packed documents are in ``trainer.lm.model``, and
the layers are the same: only attention is not causal. SigLIP and CLIP have learned positions. The patches of
Qwen2.5-VL have rotary ones, half of them for the row and half for the column, and most of its layers attend within
windows. CLIP adds a class token in front of each image or tile; it is no feature.
"""

from __future__ import annotations

from functools import lru_cache
from typing import List, Tuple, cast

import torch
from torch import nn

from trainer.lm.batch import Images
from trainer.lm.model import Borders, Layer, Norm, Turn, borders_of, embedding, frequencies
from trainer.lm.shape import Rope
from trainer.vlm.shape import Tower, VlmShape


@lru_cache(maxsize=8)  # no buffer of the model, as in trainer.lm.model
def _frequencies_on(head: int, device: torch.device) -> torch.Tensor:
    return frequencies(Rope(), head // 2, 0)[0].to(device)


class Vision(nn.Module):
    """The tower. ``forward`` returns the output of its last layer for each patch."""

    def __init__(self, shape: Tower, checkpointing: str = "off") -> None:
        super().__init__()
        width = shape.n_embd
        self.shape = shape
        self.patch = nn.Linear(shape.pixels * shape.frames, width, bias=shape.kind == "siglip")
        self.places = embedding(shape.places, width) if shape.places else None
        self.start = nn.Parameter(torch.zeros(width)) if shape.has_class_token else None
        self.norm = Norm(width, shape.norm_eps, bias=True) if shape.has_class_token else None
        self.layers = nn.ModuleList([Layer(shape, 0.0, checkpointing) for _ in range(shape.n_layer)])

    @property
    def blocks(self) -> List[Layer]:
        """The layers."""
        return [cast("Layer", layer) for layer in self.layers]

    def forward(self, images: Images) -> torch.Tensor:
        """Map images to the last hidden states of their patches, (patches, width)."""
        patches = images.patches.to(self.patch.weight.dtype)
        if self.shape.frames > 1:
            by_channel = patches.unflatten(1, (self.shape.channels, 1, -1))
            patches = by_channel.expand(-1, -1, self.shape.frames, -1).flatten(1)
        x = self.patch(patches)
        if self.places is not None:
            row, column = images.positions.unbind(-1)
            x = x + self.places(row * self.shape.grid + column + self.shape.has_class_token)
        ends, longest, where = images.ends, images.longest, None
        if self.start is not None and self.places is not None and self.norm is not None:
            starts, where, ends = _with_starts(ends, len(x))
            first = self.start + self.places.weight[0]
            x = torch.cat((x, first.expand(len(starts), -1)))[torch.argsort(torch.cat((where, starts)))]
            x, longest = self.norm(x), longest + 1
        x = self._run(x.unsqueeze(0), images, ends, longest).squeeze(0)
        return x if where is None else x[where]

    def _run(self, x: torch.Tensor, images: Images, ends: torch.Tensor, longest: int) -> torch.Tensor:
        tokens = x.shape[1]
        whole, _ = borders_of(ends, tokens, longest, is_causal=False)
        parts = whole
        if images.windows is not None and self.shape.window:
            parts, _ = borders_of(images.windows, tokens, self.shape.window_patches, is_causal=False)
        turn = None if self.places is not None else self._turn(images.positions)
        for number, layer in enumerate(self.layers):
            borders: Borders = whole if number in self.shape.whole else parts
            x = layer(x, turn, borders)
        return x

    def _turn(self, positions: torch.Tensor) -> Turn:
        angle = _frequencies_on(self.shape.head, positions.device)
        angles = (positions.unsqueeze(-1).float() * angle).flatten(1)  # of the row, then of the column
        angles = angles.unsqueeze(1)
        return angles.cos(), angles.sin()


def _with_starts(ends: torch.Tensor, patches: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put a token in front of each image or tile, and of each empty one, so that the number is always the same.

    Returns:
        The places of these tokens, those of the patches, and where the images or tiles now end.
    """
    numbers = torch.arange(len(ends), device=ends.device, dtype=ends.dtype)
    image = torch.searchsorted(ends, torch.arange(patches, device=ends.device), right=True)
    return (ends + numbers)[:-1], torch.arange(patches, device=ends.device) + image, ends + numbers


class Projector(nn.Module):
    """Maps the tower's output to embeddings of the decoder: two matrices with GELU between them.

    Qwen2.5-VL's also normalises, and maps each ``merge x merge`` patches to one feature. LLaVA-OneVision's has one more
    embedding, of a line end.
    """

    def __init__(self, shape: VlmShape) -> None:
        super().__init__()
        tower, inner, bias = shape.tower, shape.projector_inner, shape.projector_bias
        self.norm = Norm(tower.n_embd, 1e-6, bias=False) if shape.kind == "qwen2_5_vl" else None
        self.up = nn.Linear(tower.feature, inner, bias=bias)
        self.down = nn.Linear(inner, shape.n_embd, bias=bias)
        self.newline = nn.Parameter(torch.zeros(shape.n_embd)) if shape.has_newline else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (patches, width of the tower) to (features, width of the decoder); the last row may be the line end."""
        if self.norm is not None:
            x = self.norm(x)
        x = self.down(nn.functional.gelu(self.up(x.reshape(-1, self.up.in_features))))
        return x if self.newline is None else torch.cat((x, self.newline.unsqueeze(0)))
