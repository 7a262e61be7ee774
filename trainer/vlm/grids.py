"""What an image of a size becomes: patches, and the features of its image tokens. Pure functions of the size.

Qwen2.5-VL resizes an image to a multiple of its features' side. LLaVA-OneVision sees a whole image as one tile, and
then in the best grid of tiles: there the features of padding are dropped, and an embedding of a line end follows each
row. An image among several of a sample is one tile, padded to a square.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, List, Tuple

import numpy as np

from trainer.vlm.processing import QWEN, Processing

LINE_END = -1  # in ``Grid.features``: the embedding of a line end


@dataclass(frozen=True)
class Grid:
    """What an image becomes.

    Attributes:
        height: of the resized image in pixels, without padding.
        width: of the resized image in pixels, without padding.
        rows: patches (Qwen2.5-VL) or tiles in a column; 0: the image is one tile.
        columns: patches or tiles in a row.
        seen: the first and the last + 1 row, and column, of the features that are no padding.
        patches: their number.
        tokens: image tokens.
        ends: the number of images or tiles.
        windows: the number of windows.
    """

    height: int
    width: int
    rows: int
    columns: int
    seen: Tuple[int, int, int, int]
    patches: int
    tokens: int
    ends: int
    windows: int = 0


@dataclass(frozen=True)
class Layout:
    """The numbers of an image for ``Images``, from 0.

    Attributes:
        positions: (patches, 2): row and column of each patch in its image or tile.
        ends: where the images or tiles end, in patches.
        windows: where the windows end, in patches.
        features: which feature each image token is, or LINE_END.
    """

    positions: Any
    ends: Any
    windows: Any
    features: Any


@lru_cache(maxsize=1 << 16)
def grid_of(processing: Processing, height: int, width: int, alone: bool) -> Grid:
    """Return what an image becomes. ``alone``: it is the only one of its sample."""
    if processing.kind == QWEN:
        return _qwen(processing, *resized(processing, height, width))
    each = processing.side**2
    if not alone:
        return Grid(processing.tile, processing.tile, 0, 0, (0, 0, 0, 0), each, each + 1, 1)
    rows, columns = _best(processing, height, width)
    size = _fitted(height, width, rows * processing.tile, columns * processing.tile)
    seen = _unpadded(rows * processing.side, columns * processing.side, height, width)
    tiles = 1 + rows * columns
    tokens = each + (seen[1] - seen[0]) * (seen[3] - seen[2] + 1)
    return Grid(*size, rows, columns, seen, tiles * each, tokens, tiles)


@lru_cache(maxsize=1 << 9)
def layout_of(processing: Processing, grid: Grid) -> Layout:
    """Return the positions, ends, windows and features of an image."""
    return _windowed(processing, grid) if processing.kind == QWEN else _tiled(processing, grid)


def resized(processing: Processing, height: int, width: int) -> Tuple[int, int]:
    """Return the size to which Qwen2.5-VL resizes an image: transformers v5.6.0, ``smart_resize``."""
    factor = processing.patch * processing.merge
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > processing.max_pixels:
        beta = math.sqrt(height * width / processing.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < processing.min_pixels:
        beta = math.sqrt(processing.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def _qwen(processing: Processing, height: int, width: int) -> Grid:
    rows, columns = height // processing.patch, width // processing.patch
    high, wide = rows // processing.merge, columns // processing.merge
    windows = -(-high // processing.window_side) * -(-wide // processing.window_side)
    return Grid(height, width, rows, columns, (0, 0, 0, 0), rows * columns, high * wide, 1, windows)


def _windowed(processing: Processing, grid: Grid) -> Layout:
    merge = processing.merge
    side = processing.window_side
    high, wide = grid.rows // merge, grid.columns // merge
    merged = np.arange(high * wide).reshape(high, wide)
    blocks = [
        merged[top : top + side, left : left + side].reshape(-1)
        for top in range(0, high, side)
        for left in range(0, wide, side)
    ]
    order = np.concatenate(blocks)  # of the features, window by window
    features = np.empty(len(order), dtype=np.int64)
    features[order] = np.arange(len(order))
    inside = np.stack(np.divmod(np.arange(merge**2), merge), axis=-1)
    corners = np.stack(np.divmod(order, wide), axis=-1) * merge
    positions = (corners[:, None] + inside).reshape(-1, 2)
    windows = np.cumsum([len(block) for block in blocks]) * merge**2
    return Layout(positions, np.array([len(positions)]), windows, features)


def _best(processing: Processing, height: int, width: int) -> Tuple[int, int]:
    """Return the rows and columns of the best grid: transformers v5.6.0, ``select_best_resolution``."""
    best, most, least = processing.grids[0], 0, math.inf
    for rows, columns in processing.grids:
        high, wide = rows * processing.tile, columns * processing.tile
        scale = min(wide / width, high / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        wasted = high * wide - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (rows, columns), effective, wasted
    return best


def _tiled(processing: Processing, grid: Grid) -> Layout:
    side, rows, columns = processing.side, grid.rows, grid.columns
    each = side**2
    positions = np.tile(np.stack(np.divmod(np.arange(each), side), axis=-1), (grid.ends, 1))
    ends = np.arange(1, grid.ends + 1) * each
    features: List[Any] = [np.arange(each)]
    if rows:
        numbers = np.arange(each, grid.patches).reshape(rows, columns, side, side)
        numbers = numbers.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        numbers = numbers[grid.seen[0] : grid.seen[1], grid.seen[2] : grid.seen[3]]
        features.append(np.pad(numbers, ((0, 0), (0, 1)), constant_values=LINE_END).reshape(-1))
    else:
        features.append(np.array([LINE_END]))
    return Layout(positions, ends, ends[:0], np.concatenate(features))


def _unpadded(high: int, wide: int, height: int, width: int) -> Tuple[int, int, int, int]:
    """Return the features that are no padding: transformers v5.6.0, ``unpad_image`` of LLaVA-OneVision."""
    if width / height > wide / high:
        padding = (high - int(round(height * (wide / width), 7))) // 2
        return padding, high - padding, 0, wide
    padding = (wide - int(round(width * (high / height), 7))) // 2
    return 0, high, padding, wide - padding


def _fitted(height: int, width: int, high: int, wide: int) -> Tuple[int, int]:
    """Return the largest size with an image's shape within a size."""
    if wide / width < high / height:
        return min(math.ceil(height * (wide / width)), high), wide
    return high, min(math.ceil(width * (high / height)), wide)
