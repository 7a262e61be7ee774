"""How many patches a row has room for, and how long the arrays of ``Images`` are.

All batches have the same sizes, so each row has room for a number of patches of which little is padding, and with
which rows still fill up with tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np

from trainer.lm import packing
from trainer.vlm.processing import QWEN, Processing

TRIED = (1.0, 1.02, 1.04, 1.07, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0, 3.0)  # times the mean patches of a row
ROWS = 512  # packed to compare capacities
GOOD = 0.01  # share of tokens that may be padding
NEAR = 0.005  # above the least padding


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
    """Return the smallest number of patches of a row with which little of the tokens is padding.

    Args:
        processing: of the images.
        block: tokens of a row.
        lengths: the tokens of each sample.
        patches: those of each sample.
        largest: the patches of any sample that must fit, such as those of evaluations.
    """
    step = unit(processing)
    total = sum(lengths)
    least = max(step, largest, sum(patches) * block / max(1, total))
    chosen = packing.order([len(lengths)], [1.0], 0, 0)
    taken = int(np.searchsorted(np.cumsum([lengths[each] for each in chosen]), ROWS * block)) + 1
    found = {}
    for times in TRIED:
        room = math.ceil(least * times / step) * step
        if room not in found:
            found[room] = _padding(chosen[:taken], lengths, patches, block, room)
        if found[room] <= GOOD:
            return room
    best = min(found.values())
    return min(room for room, padding in found.items() if padding <= best + NEAR)


def _padding(chosen: Sequence[int], lengths: Sequence[int], patches: Sequence[int], block: int, room: int) -> float:
    second = packing.Second(patches, room)
    most = packing.most_per_row(lengths, block)
    rows = packing.pack_epoch(chosen, lengths, block, most, 0, second).rows
    # The last row is seldom full, which says nothing about a whole epoch.
    return 1 - min(1.0, sum(lengths[each] for each in chosen) / (max(1, rows - 1) * block))
