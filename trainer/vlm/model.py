"""A vision-language model: a decoder of ``trainer.lm`` whose image tokens get their embeddings from a vision tower.

Each image token of a batch takes a feature of the projector instead of its embedding (``Images.features`` and
``places``). A batch without images has patches of padding: the tower runs on them, and its parameters get gradients of
zero. So engines, which wait for the gradient of every parameter, need not know. No shape depends on the data.
"""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

import torch
from torch import nn

from trainer.lm.batch import Images
from trainer.lm.model import Decoder, Layer, Past
from trainer.vlm.shape import VlmShape
from trainer.vlm.tower import Projector, Vision


class VisionLanguage(Decoder):
    """The model. ``forward`` returns the loss if it gets targets, else logits."""

    def __init__(self, shape: VlmShape, dropout: float = 0.0, checkpointing: str = "off") -> None:
        super().__init__(shape, dropout, checkpointing)
        self.tower = Vision(shape.tower, checkpointing)
        self.projector = Projector(shape)
        self._see: Optional[Callable[[Images], torch.Tensor]] = None

    @property
    def blocks(self) -> List[Layer]:
        """All transformer layers: what is compiled, sharded and gathered one by one."""
        return [*self.tower.blocks, *super().blocks]

    @property
    def sections(self) -> List[nn.Module]:
        """What else FSDP gathers apart from the rest. Each is of one part, which may be frozen in another data type."""
        return [self.tower, self.projector, *super().sections]

    def part_of(self, name: str) -> str:
        """Return the part that a parameter belongs to: ``vision``, ``projector`` or ``language``."""
        return {"tower": "vision", "projector": "projector"}.get(name.partition(".")[0], "language")

    def compile_whole(self) -> None:
        """See ``Decoder``. The tower and the projector are compiled as another one."""
        super().compile_whole()
        self._see = torch.compile(self.features)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: Optional[torch.Tensor] = None,
        past: Optional[Sequence[Past]] = None,
        ends: Optional[torch.Tensor] = None,
        count: Optional[torch.Tensor] = None,
        positions: Optional[torch.Tensor] = None,
        images: Optional[Images] = None,
    ) -> torch.Tensor:
        """See ``Decoder``. Without ``images`` all tokens are text; a batch of a training always has them."""
        x = self.embed(tokens)
        if images is not None:
            x = self.with_images(x, images)
        return self.loss(x, targets, past, ends, count, positions)

    def with_images(self, x: torch.Tensor, images: Images) -> torch.Tensor:
        """Return embeddings (batch, n, width) with the features of images in place of their tokens' embeddings."""
        see = self._see if self._see and self.training else self.features  # an evaluation is not compiled again
        features = see(images)
        flat = torch.cat((x.flatten(0, 1), x.new_zeros(1, x.shape[-1])))  # the last row is the place of padding
        return flat.index_copy(0, images.places, features.to(x.dtype))[:-1].view(x.shape)

    def features(self, images: Images) -> torch.Tensor:
        """Return the embedding of each image token, (image tokens, width)."""
        found: torch.Tensor = self.projector(self.tower(images))
        return found.index_select(0, images.features)


def flops_per_patch(shape: VlmShape, patches: float, is_frozen: bool = False) -> float:
    """Return the floating point operations of tower and projector per patch, forward and backward, as MFU counts them.

    6N + 12·L·D·T as for tokens (``trainer.lm.model.flops_per_token``), where N are the parameters that a patch is
    multiplied with, and T are the patches that it attends to: those of its image or tile, or of its window. The
    projector runs once for ``merge x merge`` patches, so its share is smaller. Without trained parameters in the tower
    there is only the forward pass: 2N + 4·L·D·T. Padding is counted if it is in the patches.

    Args:
        shape: of the model.
        patches: of an image or tile, on average.
        is_frozen: whether the tower is. The projector is taken as trained.
    """
    tower = shape.tower
    looks = len(tower.whole) if tower.window else tower.n_layer
    seen = float(looks * patches)
    if tower.window:
        seen += (tower.n_layer - looks) * min(patches, tower.window_patches)
    weights_of_tower = tower.n_embd * tower.pixels * tower.frames + tower.n_layer * tower.layer_parameters
    of_tower = 6.0 * weights_of_tower + 12.0 * tower.n_embd * seen
    of_projector = 6.0 * shape.projector_parameters / tower.merge**2
    return (of_tower / 3 if is_frozen else of_tower) + of_projector
