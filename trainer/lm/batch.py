"""What a training takes in a micro-step: a batch, where it comes from, and which samples each rank takes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Callable, Optional, Protocol

import torch

IGNORED = -100  # a target without a loss, as in torch's cross_entropy


@dataclass(frozen=True)
class Images:
    """The images of a rank's micro-step. Without any image, all of it is padding.

    Attributes:
        patches: (patches, channels x height x width of a patch), float32: normalised pixels, in the order of the
            weights of a convolution. Padding is zeros, at the end. For Qwen2.5-VL the patches are in the order of its
            windows, and the four that are merged into a feature follow each other.
        positions: (patches, 2), int64: row and column of each patch in its image or tile.
        ends: int32: where the images or tiles end, in patches. Starts with 0, and repeats its last value up to a length
            that is the same for every batch. Patches attend within their image or tile; padding is one of them.
        windows: int32, as ``ends``, for the layers of Qwen2.5-VL that attend within a window; None: there are none.
            Padding is divided, too: no piece has more patches than a window.
        longest: at least the patches of the longest image or tile, padding included.
        features: (image tokens,), int64: which feature of the projector each image token is. One number beyond the last
            feature stands for the embedding of a line end (LLaVA-OneVision's ``image_newline``).
        places: (image tokens,), int64: the place of each in the flattened batch. Padding has the place ``batch x n``,
            which is none.
    """

    patches: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    windows: Optional[torch.Tensor]
    longest: int
    features: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """A rank's part of a micro-step.

    Attributes:
        tokens: (batch, n), int64.
        targets: (batch, n), int64: the next tokens, and IGNORED where there is no loss.
        ends: int32, the ends of the documents in the flattened batch: starts with 0, and repeats the last end up to a
            length that is the same for every batch. A row's padding is a document. None: each row is one document.
        count: the targets of the whole step, divided by ranks x micro-steps. The mean over ranks and micro-steps of
            (sum of a batch's losses / count) is the mean loss of the step.
        images: of a vision-language model.
        positions: (3, batch, n), int64: of each token in time, height and width, for a model with such rotary positions
            (Qwen2.5-VL); None: the places in the documents.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    ends: Optional[torch.Tensor]
    count: float
    images: Optional[Images] = None
    positions: Optional[torch.Tensor] = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return the batch in memory from which a GPU copies without waiting."""
        return self._with(torch.Tensor.pin_memory)

    def _with(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with each tensor moved."""

        def each(held: Any) -> Any:
            if isinstance(held, torch.Tensor):
                return moved(held)
            if isinstance(held, Images):
                return Images(*(each(getattr(held, field.name)) for field in fields(held)))
            return held

        return Batch(*(each(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class Layout:
    """How the rows of a step are divided: over ranks, micro-steps, and the rows of a batch."""

    rank: int
    world: int
    micro_steps: int
    batch: int

    @property
    def rows(self) -> int:
        """The rows of a step on all ranks."""
        return self.world * self.micro_steps * self.batch

    def numbers(self, step: int, micro: int) -> range:
        """Return the numbers of the rows that this rank takes in a micro-step."""
        first = ((step * self.micro_steps + micro) * self.world + self.rank) * self.batch
        return range(first, first + self.batch)

    def count(self, targets: int) -> float:
        """Return a batch's ``count`` in a step with this number of targets."""
        return max(1, targets) / (self.world * self.micro_steps)


class Source(Protocol):
    """Batches by number. What a step sees does not depend on the number of ranks."""

    def batch(self, layout: Layout, step: int, micro: int) -> Batch:
        """Return a rank's batch of a micro-step."""

    def steps(self, epochs: int, global_batch: int) -> int:
        """Return the number of steps of some passes over the data."""
