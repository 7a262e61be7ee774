"""The data of vision-language training: conversations with and without images, packed into rows of whole samples.

A row has at most ``block`` tokens and at most so many patches of images, so all batches have the same sizes. Images are
decoded while training, in threads. What ``trainer.lm.finetune`` says about data sets is true here, too.
"""

from __future__ import annotations

import os
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch

from trainer.lm import chat, finetune, packing, records, sources, tokenized
from trainer.lm.batch import Batch, Images, Layout
from trainer.lm.config import Config
from trainer.lm.finetune import FineTuningData, Part
from trainer.lm.sources import Data
from trainer.lm.tokenized import Tokenized
from trainer.vlm.capacity import Capacity, capacity_of, choose, unit
from trainer.vlm.encoding import Encoding, with_token
from trainer.vlm.grids import LINE_END, Grid, layout_of
from trainer.vlm.processing import Processing
from trainer.vlm.samples import Pictured, pictured

THREADS = 16  # that decode images for a rank, at most


def patches_in(part: Part) -> List[int]:
    """Return the patches of each sample of a part in a row."""
    source = _pictured(part.source)
    found = source.patch_counts[part.numbers].tolist()
    whole = source.counts[0][part.numbers]
    for each in np.flatnonzero(whole > np.asarray(part.lengths) + 1):  # a sample that was cut has fewer images
        images = source.seen(part.numbers[each], part.lengths[each])
        found[each] = sum(int(source.sizes[image, 0]) for image, _ in images)
    return [int(each) for each in found]


def _pictured(source: Tokenized) -> Pictured:
    assert isinstance(source, Pictured)
    return source


@dataclass(frozen=True)
class _Seen:
    """An image in a batch. ``place``: of its first token in the flattened batch; ``patch``: its first patch."""

    source: Pictured
    image: int
    grid: Grid
    place: int
    patch: int


class Packed(finetune.Packed):
    """A ``Source``: samples of several sets with their images, packed into rows. A pool of threads decodes images."""

    def __init__(
        self, parts: Sequence[Part], block: int, seed: int, epochs: int, capacity: Capacity, pool: ThreadPoolExecutor
    ) -> None:
        second = packing.Second(array("I", [each for part in parts for each in patches_in(part)]), capacity.patches)
        super().__init__(parts, block, seed, epochs, second)
        self.capacity = capacity
        self._processing = _pictured(parts[0].source).processing
        self._pool = pool

    def report(self) -> str:
        """See ``finetune.Packed``."""
        facts = (super().report(), self.capacity.patches, 100 * self.plan.padding_of_second())
        return "%s, and room for %d patches in each row, %.1f %% of them padding" % facts

    def batch(self, layout: Layout, step: int, micro: int) -> Batch:
        """See ``Source``.

        Raises:
            FailedError: an image can no longer be read.
        """
        text = super().batch(layout, step, micro)
        seen: List[_Seen] = []
        positions = np.tile(np.arange(self.plan.room), (3, layout.batch, 1))
        patch = 0
        for row, number in enumerate(layout.numbers(step, micro)):
            place = 0
            for sample in self.plan.row(number):
                found, inside = self.origin(sample)
                source, length = _pictured(found), self.plan.lengths[sample]
                grids: List[Tuple[int, Grid]] = []
                for image, start in source.seen(inside, length):
                    grid = source.grid(image, len(source.images_of(inside)) == 1)
                    seen.append(_Seen(source, image, grid, row * self.plan.room + place + start, patch))
                    grids.append((start, grid))
                    patch += grid.patches
                if self._processing.has_positions:
                    positions[:, row, place : place + length] = _positions(self._processing, grids, length)
                place += length
            positions[:, row, place:] -= place
        three = torch.from_numpy(positions) if self._processing.has_positions else None
        return replace(text, images=self._images(seen, layout.batch), positions=three)

    def _images(self, seen: Sequence[_Seen], batch: int) -> Images:
        processing, capacity = self._processing, self.capacity
        total = capacity.patches * batch
        patches = np.zeros((total, 3 * processing.patch**2), dtype=np.float32)
        positions = np.zeros((total, 2), dtype=np.int64)
        features = np.zeros(capacity.tokens * batch, dtype=np.int64)
        places = np.full(capacity.tokens * batch, self.plan.room * batch, dtype=np.int64)
        ends: List[Any] = []
        windows: List[Any] = []
        token = patch = 0

        def decode(each: _Seen) -> None:
            patches[each.patch : each.patch + each.grid.patches] = each.source.patches(each.image, each.grid)

        for each in seen:
            layout = layout_of(processing, each.grid)
            patch, number = each.patch + each.grid.patches, each.grid.tokens
            positions[each.patch : patch] = layout.positions
            ends.append(each.patch + layout.ends)
            windows.append(each.patch + layout.windows)
            first, beyond = each.patch // processing.merge**2, total // processing.merge**2
            features[token : token + number] = np.where(layout.features == LINE_END, beyond, first + layout.features)
            places[token : token + number] = np.arange(each.place, each.place + number)
            token += number
        for _ in self._pool.map(decode, seen):
            pass  # raises what a thread raised
        closed = [
            torch.from_numpy(_closed(found, patch, total, piece, capacity.entries(batch, density)))
            for found, piece, density in (
                (ends, capacity.longest, capacity.ends),
                (windows, capacity.window, capacity.windows),
            )
            if piece
        ]
        return Images(
            torch.from_numpy(patches),
            torch.from_numpy(positions),
            closed[0],
            closed[1] if len(closed) > 1 else None,
            capacity.longest,
            torch.from_numpy(features),
            torch.from_numpy(places),
        )


def _closed(ends: Sequence[Any], used: int, total: int, piece: int, entries: int) -> Any:
    """Return ends from 0 to ``total``, of a fixed length. Padding is divided into pieces: attention is quadratic."""
    found = np.full(entries, total, dtype=np.int32)
    padding = np.arange(used + piece, total, piece)
    each = np.concatenate(([0], *ends, padding))
    found[: len(each)] = each
    return found


def _positions(processing: Processing, grids: Sequence[Tuple[int, Grid]], length: int) -> Any:
    """Return the positions of a sample's tokens, (3, length): transformers v5.6.0, ``get_rope_index``."""
    found = np.empty((3, length), dtype=np.int64)
    done = position = 0
    for start, grid in grids:
        found[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        done = start + grid.tokens
        high, wide = grid.rows // processing.merge, grid.columns // processing.merge
        row, column = np.divmod(np.arange(grid.tokens), wide)
        found[:, start:done] = position + np.stack((np.zeros_like(row), row, column))
        position += max(high, wide)
    found[:, done:] = np.arange(position, position + length - done)
    return found


@dataclass(frozen=True)
class VisionData(FineTuningData):
    """Opened data sets with images. All batches have the sizes of ``capacity``, those of evaluations too.

    ``processing`` has the number of the image token.
    """

    processing: Processing
    capacity: Capacity
    pool: ThreadPoolExecutor

    def packed(self, seed: int, epochs: int = 0) -> Packed:
        """See ``FineTuningData``."""
        return Packed(self.train, self.block, seed, epochs, self.capacity, self.pool)

    def evaluations(self) -> Dict[str, finetune.Packed]:
        """See ``FineTuningData``."""
        return {
            name: Packed([part], self.block, 0, 1, self.capacity, self.pool) for name, part in self.held_back.items()
        }


@dataclass(frozen=True)
class Reading(finetune.Reading):
    """How data sets with images are read.

    Attributes:
        images: the folder of relative paths; empty: the folder of the data.
        decodes: whether encoding decodes every image, see ``trainer.vlm.images.size_of``.
        patches: of a row, at most; 0: chosen for the data.
        threads: that decode images; 0: one per core of this rank, up to 16.
    """

    images: str = ""
    decodes: bool = False
    patches: int = 0
    threads: int = 0


def open_data(named: Sequence[str], evaluated: Sequence[str], reading: Reading, processing: Processing) -> VisionData:
    """Open data sets for training, and ones only for evaluation, as ``finetune.open_data`` does.

    Raises:
        RefusedError: a file, a record or an image is wrong, or no sample is left.
    """
    tokenizer, token, processing = with_token(finetune.tokenizer_of(reading.model), processing)
    template = chat.load(reading.model, reading.template)
    most = -(-reading.patches // unit(processing)) * unit(processing)

    def tokenized_of(path: Path, name: str) -> Pictured:
        folder = Path(reading.images) if reading.images else path if path.is_dir() else path.parent
        encoding = Encoding(tokenizer, template, reading.skips, token, str(folder.absolute()), reading.decodes)
        found = tokenized.prepare(records.files_of(path), name, encoding, reading.cache, reading.workers)
        return replace(pictured(found, processing, folder.absolute()), capacity=most)

    opened = finetune.open_sets(named, evaluated, reading, template.where, tokenized_of)
    parts = [*opened.train, *opened.held_back.values()]
    sizes = np.concatenate([_pictured(part.source).sizes for part in parts])
    patches = most or choose(
        processing,
        reading.block,
        [each for part in opened.train for each in part.lengths],
        [each for part in opened.train for each in patches_in(part)],
        max(each for part in parts for each in patches_in(part)),
    )
    capacity = capacity_of(processing, patches, reading.block, sizes)
    pool = ThreadPoolExecutor(reading.threads or _threads(), "images")
    known = {each.name: getattr(opened, each.name) for each in fields(opened)}
    return VisionData(**known, processing=processing, capacity=capacity, pool=pool)


def open_pictures(config: Config, model: Path, processing: Processing) -> Data:
    """Open the data that a training's options name. ``model``: the folder with tokenizer and template.

    Raises:
        RefusedError: see ``open_data``.
    """
    known = sources.reading_of(config, model)
    reading = Reading(
        **{each.name: getattr(known, each.name) for each in fields(known)},
        images=config.image_folder,
        decodes=config.check_images,
        patches=config.patches,
        threads=config.image_threads,
    )
    found = open_data(config.data, config.eval_data, reading, processing)
    opened = sources.of_chats(config, found)
    return replace(opened, patches=patches_per_token(found.train))


def patches_per_token(parts: Sequence[Part]) -> Tuple[float, float]:
    """Return the patches for each token of some data, and those of each image or tile, on average."""
    sizes = np.concatenate([_pictured(part.source).sizes for part in parts])
    patches = sum(sum(patches_in(part)) for part in parts)
    tokens = sum(sum(part.lengths) for part in parts)
    return patches / max(1, tokens), float(sizes[:, 0].sum() / max(1, sizes[:, 2].sum()))


def _threads() -> int:
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(THREADS, len(os.sched_getaffinity(0)) // max(1, ranks)))
