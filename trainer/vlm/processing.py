"""How a model sees images: sizes of patches, tiles and windows, the colours' mean, and the token of an image.

The model's shape has the sizes, and its ``preprocessor_config.json`` the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from trainer.lm.errors import RefusedError
from trainer.vlm.shape import KINDS, Tower, VlmShape

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # transformers 5 writes this instead, with the same fields under image_processor
JSON = 16 << 20  # bytes of such a file, at most
SIDE = 1 << 14  # pixels of a side of a tile, at most
TILES = 9  # of an image, beside the whole image: transformers shrinks the features of more
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280
ONEVISION, QWEN = KINDS
IMAGE = "<image>"  # LLaVA's image token
IMAGE_PAD = "<|image_pad|>"  # Qwen's
BICUBIC = 3  # Pillow's number
Colours = Tuple[Tuple[float, ...], Tuple[float, ...]]
# Mean and deviation that transformers assumes: CLIP's also for Qwen2.5-VL and LLaVA-OneVision.
CLIP: Colours = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
SIGLIP: Colours = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True)
class Processing:
    """How images become patches and tokens.

    Attributes:
        kind: QWEN: an image keeps its shape; ONEVISION: it is cut into tiles.
        patch: pixels of a side of a patch.
        mean: of each colour.
        std: of each colour.
        token: the number of the image token; -1: the tokenizer's number of ``IMAGE`` or ``IMAGE_PAD``, or the next.
        token_text: the text of a token that is -1; empty: one of these.
        resample: Pillow's number of the method of resizing.
        merge: QWEN: patches of a side of a feature.
        window: QWEN: pixels of a side of a window of attention.
        min_pixels: QWEN: of a resized image, at least.
        max_pixels: QWEN: of a resized image, at most.
        tile: ONEVISION: pixels of a side of a tile.
        grids: ONEVISION: the numbers of rows and columns of tiles from which an image takes the best.
    """

    kind: str
    patch: int
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    token: int
    token_text: str = ""
    resample: int = BICUBIC
    merge: int = 1
    window: int = 0
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    tile: int = 0
    grids: Tuple[Tuple[int, int], ...] = ()

    @property
    def side(self) -> int:
        """Patches of a side of a tile. Pixels behind the last whole patch are not seen, as in a convolution."""
        return self.tile // self.patch

    @property
    def window_side(self) -> int:
        """Features of a side of a window."""
        return self.window // self.patch // self.merge

    @property
    def has_positions(self) -> bool:
        """Whether a token has three positions: time, height and width."""
        return self.kind == QWEN


def of_shape(shape: VlmShape, folder: Path, max_pixels: int = 0, tiles: int = TILES) -> Processing:
    """Return the processing of a vision-language model.

    Args:
        shape: of the model.
        folder: with ``preprocessor_config.json``.
        max_pixels: of an image of Qwen2.5-VL, fewer than the model's; 0: the model's.
        tiles: of an image of LLaVA-OneVision, at most.

    Raises:
        RefusedError: a file or a field is missing or wrong, or the limits leave no size.
    """
    fields = _preprocessor(folder)
    if shape.kind == QWEN:
        return _qwen(shape, fields, max_pixels)
    found = replace(_tiled(shape.tower, fields, tiles), token=shape.image_token)
    sizes = [(height // found.tile, width // found.tile) for height, width in shape.pinpoints]
    grids = tuple(grid for grid in sizes if grid[0] * grid[1] <= tiles)
    if not grids:
        what = "%s: image_grid_pinpoints has no size with at most %d tiles" % (folder, tiles)
        raise RefusedError(what, "use a larger --max-tiles")
    return replace(found, grids=grids)


def of_tower(tower: Tower, folder: Path, tiles: int = TILES) -> Processing:
    """Return the processing of a tower that a decoder is put behind. It sees LLaVA-OneVision's tiles.

    Raises:
        RefusedError: see ``of_shape``.
    """
    return _tiled(tower, _preprocessor(folder), tiles, SIGLIP if tower.kind == "siglip" else CLIP)


@dataclass(frozen=True)
class _Fields:
    """The fields of a JSON object. ``where`` names it in messages."""

    where: str
    values: Dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> _Fields:
        try:
            with path.open("rb") as file:
                data = file.read(JSON + 1)
            found = json.loads(data) if len(data) <= JSON else None
        except (OSError, ValueError, RecursionError) as error:
            raise RefusedError("%s cannot be read: %s" % (path, error), "copy it from the model again") from error
        if not isinstance(found, dict):
            raise RefusedError("%s is not a JSON object of at most %d MiB" % (path, JSON >> 20))
        return cls(str(path), found)

    def part(self, name: str) -> _Fields:
        found = self.values.get(name)
        if not isinstance(found, dict):
            raise RefusedError("%s: the field %r is missing or not an object" % (self.where, name))
        return _Fields("%s: %s" % (self.where, name), found)

    def whole(self, name: str, least: int, most: int = 1 << 31, default: Optional[int] = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            shown = (self.where, name, str(value)[:40], least, most)
            raise RefusedError("%s: the field %r is %s, not a number from %d to %d" % shown)
        return value

    def colours(self, name: str, least: float, default: Tuple[float, ...]) -> Tuple[float, ...]:
        value = self.values.get(name, list(default))
        if not isinstance(value, list) or len(value) != 3 or not all(_is_finite(each, least) for each in value):
            raise RefusedError("%s: the field %r is not a list of 3 numbers" % (self.where, name))
        return tuple(float(each) for each in value)


def _is_finite(value: Any, least: float) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and math.isfinite(value) and least <= value < 1e3


def _preprocessor(folder: Path) -> _Fields:
    if not (folder / PREPROCESSOR).is_file() and (folder / PROCESSOR).is_file():
        return _Fields.of(folder / PROCESSOR).part("image_processor")
    return _Fields.of(folder / PREPROCESSOR)


def _common(fields: _Fields, colours: Colours = CLIP) -> Dict[str, Any]:
    return {
        "mean": fields.colours("image_mean", 0.0, colours[0]),
        "std": fields.colours("image_std", 1e-3, colours[1]),
        "resample": fields.whole("resample", 0, 5, BICUBIC),
    }


def _qwen(shape: VlmShape, fields: _Fields, max_pixels: int) -> Processing:
    tower = shape.tower
    size = fields.part("size") if isinstance(fields.values.get("size"), dict) else fields
    limits = []
    for older, newer, default in (
        ("min_pixels", "shortest_edge", MIN_PIXELS),
        ("max_pixels", "longest_edge", MAX_PIXELS),
    ):
        source, name = (fields, older) if fields.values.get(older) is not None else (size, newer)
        limits.append(source.whole(name if name in source.values else older, 1, default=default))
    least, most = limits[0], min(limits[1], max_pixels or limits[1])
    if most < max(least, (tower.patch * tower.merge) ** 2):
        what = "images of Qwen2.5-VL have at least %d pixels, but at most %d are allowed"
        raise RefusedError(what % (max(least, (tower.patch * tower.merge) ** 2), most), "use a larger --max-pixels")
    found = Processing(QWEN, tower.patch, token=shape.image_token, **_common(fields))
    return replace(found, merge=tower.merge, window=tower.window, min_pixels=least, max_pixels=most)


def _tiled(tower: Tower, fields: _Fields, tiles: int, colours: Colours = CLIP) -> Processing:
    if tower.side > SIDE:
        raise RefusedError("tiles of %d pixels: more than %d" % (tower.side, SIDE), "use another model")
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7) if rows * columns <= tiles)
    return Processing(ONEVISION, tower.patch, token=-1, tile=tower.side, grids=grids, **_common(fields, colours))
