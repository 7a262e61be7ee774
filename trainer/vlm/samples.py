"""The samples of a data set with images: their tokens with all image tokens, and the patches of their images."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np

from trainer.lm.errors import FailedError, RefusedError
from trainer.lm.tokenized import Tokenized
from trainer.vlm.grids import Grid, grid_of
from trainer.vlm.images import Reference, patches_of, pixels_of
from trainer.vlm.processing import Processing


@dataclass(frozen=True)
class Pictured(Tokenized):
    """The samples of a data set with images. ``Tokenized`` has one token for each image; its methods, all of them.

    Attributes:
        processing: of the images.
        root: of relative paths.
        images: (images, 4), see ``trainer.vlm.encoding``.
        references: bytes.
        image_ends: where the images of each sample end, in images.
        reference_ends: where the reference of each image ends, in bytes.
        sizes: (images, 4): patches, image tokens, images or tiles, and windows of each image.
        capacity: patches of a sample, at most; 0: any number.
    """

    processing: Processing
    root: Path
    images: Any
    references: Any
    image_ends: Any
    reference_ends: Any
    sizes: Any
    capacity: int = 0

    def images_of(self, number: int) -> range:
        """Return the numbers of a sample's images."""
        return range(int(self.image_ends[number - 1]) if number else 0, int(self.image_ends[number]))

    @property
    def counts(self) -> Tuple[Any, Any]:
        """See ``Tokenized``."""
        lengths, targets = super().counts
        return lengths + self._sums(self.sizes[:, 1] - 1), targets

    @property
    def patch_counts(self) -> Any:
        """The patches of each sample."""
        return self._sums(self.sizes[:, 0])

    def _sums(self, values: Any) -> Any:
        """Return the sum of the images' values for each sample."""
        total = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[np.concatenate(([0], self.image_ends))]
        return np.diff(total)

    def cut(self, most: int) -> Any:
        """Return the tokens of each sample that a row takes: it ends before the first image that does not fit whole."""
        lengths, _ = self.counts
        found = np.minimum(lengths, most)
        large = lengths > most
        if self.capacity:
            large |= self.patch_counts > self.capacity
        for number in np.flatnonzero(large):
            patches = 0
            for image, start in zip(self.images_of(number), self._starts(number)):  # noqa: B905
                patches += int(self.sizes[image, 0])
                # A row takes the last token as a target only.
                too_long = start + int(self.sizes[image, 1]) >= most
                if too_long or (self.capacity and patches > self.capacity):
                    found[number] = min(found[number], start)
                    break
        return found

    def _starts(self, number: int) -> Any:
        """Return where the tokens of each image of a sample start."""
        kept, _ = super().sample(number, int(self.lengths[number, 0]))
        places = np.flatnonzero(kept == self.processing.token)
        more = np.cumsum([0, *(self.sizes[image, 1] - 1 for image in self.images_of(number))])[:-1]
        return [int(each) for each in places + more]

    def sample(self, number: int, length: int) -> Tuple[Any, Any]:
        """See ``Tokenized``."""
        kept, answers = super().sample(number, int(self.lengths[number, 0]))
        repeats = np.ones(len(kept), dtype=np.int64)
        repeats[kept == self.processing.token] = [self.sizes[image, 1] for image in self.images_of(number)]
        return np.repeat(kept, repeats)[:length], np.repeat(answers, repeats)[:length]

    def seen(self, number: int, length: int) -> List[Tuple[int, int]]:
        """Return the images in the first tokens of a sample, each with its first token."""
        images = self.images_of(number)
        if not images:
            return []
        return [(image, start) for image, start in zip(images, self._starts(number)) if start < length]  # noqa: B905

    def grid(self, image: int, alone: bool) -> Grid:
        """Return what an image becomes."""
        return grid_of(self.processing, int(self.images[image, 0]), int(self.images[image, 1]), alone)

    def patches(self, image: int, grid: Grid) -> Any:
        """Decode an image and return its patches.

        Raises:
            FailedError: it cannot be read.
        """
        height, width, inside, size = (int(each) for each in self.images[image])
        end = int(self.reference_ends[image])
        at = bytes(self.references[end - size : end])
        found = Reference(at if inside else at.decode("utf-8", "surrogatepass"))
        try:
            return patches_of(self.processing, grid, pixels_of(found, self.root, (height, width), self.name))
        except RefusedError as error:
            raise FailedError(
                str(error), "restore the image and resume, or start again with --check-images --skip-wrong"
            ) from error


def pictured(source: Tokenized, processing: Processing, root: Path) -> Pictured:
    """Add the images to samples that ``trainer.vlm.encoding`` wrote.

    Raises:
        RefusedError: a file is missing or damaged.
    """
    where = source.folder
    try:
        counts = np.fromfile(where / "counts.bin", dtype="<u4").astype(np.int64)
        images = np.fromfile(where / "images.bin", dtype="<u4").reshape(-1, 4)
        image_ends, reference_ends = np.cumsum(counts), np.cumsum(images[:, 3], dtype=np.int64)
        size = (where / "references.bin").stat().st_size
        references = np.memmap(where / "references.bin", dtype="u1", mode="r") if size else np.empty(0, dtype="u1")
        expected = (len(source.lengths), counts.sum(), images[:, 3].sum(dtype=np.int64))
        _check_sizes(expected, (len(counts), len(images), size))
    except (OSError, ValueError) as error:
        raise RefusedError("%s cannot be read: %s" % (where, error), "delete the folder") from error
    alone = np.repeat(counts == 1, counts)
    kinds, which = np.unique(np.column_stack((images[:, :2], alone)), axis=0, return_inverse=True)
    grids = [grid_of(processing, int(height), int(width), bool(single)) for height, width, single in kinds]
    of_grids = np.array([(each.patches, each.tokens, each.ends, each.windows) for each in grids], dtype=np.int64)
    sizes = of_grids.reshape(-1, 4)[which.reshape(-1)]
    known = {each.name: getattr(source, each.name) for each in fields(Tokenized)}
    return Pictured(
        **known,
        processing=processing,
        root=root,
        images=images,
        references=references,
        image_ends=image_ends,
        reference_ends=reference_ends,
        sizes=sizes,
    )


def _check_sizes(found: Tuple[int, ...], expected: Tuple[int, ...]) -> None:
    if found != expected:
        raise ValueError("counts.bin, images.bin and references.bin do not match")
