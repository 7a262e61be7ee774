"""How many patches a row has room for, and how long the arrays of ``Images`` are.

All batches have the same sizes, so each row has room for a number of patches. With too little room, rows do not fill
up with tokens; with too much, many patches are padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from trainer.lm import packing
from trainer.vlm.processing import QWEN, Processing

# Times the mean patches of a row. With less room, samples with images are left until the end of an epoch.
TRIED = (1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0)
ROWS = 512  # packed to compare capacities
PATCH = 0.1  # the cost of a share of the patches in that of the same share of the tokens


@dataclass(frozen=True)
class Capacity:
    """The sizes of a row's part of ``Images``.

    Attributes:
        patches: of a row.
        tokens: image tokens of a row.
        ends: images or tiles per patch, at most.
        windows: windows per patch, at most.
        longest: patches of the longest image or tile.
        window: patches of a window.
    """

    patches: int
    tokens: int
    ends: float
    windows: float
    longest: int
    window: int

    def entries(self, batch: int, density: float) -> int:
        """Return the length of an array of ends for some rows: it starts with 0, and the last piece may be short."""
        return math.floor(batch * self.patches * density + 1e-6) + 2


def unit(processing: Processing) -> int:
    """Return the number of which capacities are multiples: a tile's patches, or those of whole features."""
    return math.lcm(64, processing.merge**2) if processing.kind == QWEN else processing.side**2


def capacity_of(processing: Processing, patches: int, block: int, sizes: Any) -> Capacity:
    """Return the sizes for rows of ``patches`` patches.

    ``sizes``: (images, 4): patches, image tokens, images or tiles, and windows of each image of the data.
    """
    window = (processing.window_side * processing.merge) ** 2 if processing.kind == QWEN else 0
    longest = unit(processing)
    tokens, ends, windows = 1.0, 1 / longest, 1 / window if window else 0.0
    if len(sizes):
        per_patch = sizes[:, 1:] / sizes[:, :1]
        tokens, ends, windows = (max(least, float(each)) for least, each in zip((0.0, 0.0, windows), per_patch.max(0)))  # noqa: B905
        longest = int((sizes[:, 0] // sizes[:, 2]).max())
    return Capacity(patches, min(block, math.ceil(tokens * patches)), max(ends, 1 / longest), windows, longest, window)


def choose(processing: Processing, block: int, lengths: Sequence[int], patches: Sequence[int], largest: int) -> int:
    """Return the number of patches of a row with which padding costs least.

    Args:
        processing: of the images.
        block: tokens of a row.
        lengths: the tokens of each sample.
        patches: those of each sample.
        largest: the patches of any sample that must fit, such as those of evaluations.
    """
    step = unit(processing)
    mean = sum(patches) * block / max(1, sum(lengths))
    chosen = packing.order([len(lengths)], [1.0], 0, 0)
    taken = int(np.searchsorted(np.cumsum([lengths[each] for each in chosen]), ROWS * block)) + 1
    rooms = {max(1, math.ceil(max(largest, mean * times) / step)) * step for times in TRIED}
    return min(sorted(rooms), key=lambda room: _cost(chosen[:taken], lengths, patches, block, room))


def _cost(chosen: Sequence[int], lengths: Sequence[int], patches: Sequence[int], block: int, room: int) -> float:
    most = packing.most_per_row(lengths, block)
    rows = packing.pack_epoch(chosen, lengths, block, most, 0, packing.Second(patches, room)).rows
    # The last row is seldom full, which says nothing about a whole epoch.
    return max(1, rows - 1) * (block + PATCH * room * sum(lengths) / max(1, sum(patches)))
