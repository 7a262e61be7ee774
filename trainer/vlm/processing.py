"""How a model sees images: sizes of patches, tiles and windows, the colours' mean, and the token of an image.

All of it is in the model's ``config.json`` and ``preprocessor_config.json``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from trainer.lm.errors import RefusedError

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # transformers 5 writes this instead, with the same fields under image_processor
JSON = 16 << 20  # bytes of such a file, at most
SIDE = 1 << 14  # pixels of a side of a tile, at most
TILES = 9  # of an image, beside the whole image: transformers shrinks the features of more
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280
QWEN = "qwen2_5_vl"
ONEVISION = "llava_onevision"
IMAGE = "<image>"  # LLaVA's image token
IMAGE_PAD = "<|image_pad|>"  # Qwen's
TOWERS = ("siglip", "siglip_vision_model", "clip", "clip_vision_model")
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


def read(folder: Path, max_pixels: int = 0, tiles: int = TILES) -> Processing:
    """Read the processing of a vision-language model's folder.

    Args:
        folder: with ``config.json`` and ``preprocessor_config.json``.
        max_pixels: of an image of Qwen2.5-VL, fewer than the model's; 0: the model's.
        tiles: of an image of LLaVA-OneVision, at most.

    Raises:
        RefusedError: a file or a field is missing or wrong, or the kind of model is unknown.
    """
    config = _Fields.of(folder / CONFIG)
    kind = config.values.get("model_type")
    if kind == QWEN:
        return _qwen(config, _preprocessor(folder), max_pixels)
    if kind == ONEVISION:
        vision = config.part("vision_config")
        token = config.whole("image_token_id" if "image_token_id" in config.values else "image_token_index", 0)
        found = _tiled(vision, _preprocessor(folder), token, tiles)
        grids = _pinpoints(config, found.tile, tiles)
        return replace(found, grids=grids)
    what = "%s: the model_type is %r, and trainer.vlm trains %s and %s" % (folder / CONFIG, kind, QWEN, ONEVISION)
    raise RefusedError(what, "see docs/training.md for the models")


def of_tower(folder: Path, tiles: int = TILES) -> Processing:
    """Read the processing of a tower of SigLIP or CLIP that a decoder is put behind. It sees LLaVA-OneVision's tiles.

    Raises:
        RefusedError: see ``read``.
    """
    config = _Fields.of(folder / CONFIG)
    kind = config.values.get("model_type")
    if kind not in TOWERS:
        raise RefusedError("%s: the model_type is %r, not one of %s" % (folder / CONFIG, kind, ", ".join(TOWERS)))
    vision = config.part("vision_config") if "vision_config" in config.values else config
    return _tiled(vision, _preprocessor(folder), -1, tiles, SIGLIP if str(kind).startswith("siglip") else CLIP)


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


def _qwen(config: _Fields, fields: _Fields, max_pixels: int) -> Processing:
    vision = config.part("vision_config")
    patch, merge = vision.whole("patch_size", 1, SIDE, 14), vision.whole("spatial_merge_size", 1, 64, 2)
    window = vision.whole("window_size", patch * merge, SIDE, 112)
    size = fields.part("size") if isinstance(fields.values.get("size"), dict) else fields
    limits = []
    for older, newer, default in (
        ("min_pixels", "shortest_edge", MIN_PIXELS),
        ("max_pixels", "longest_edge", MAX_PIXELS),
    ):
        source, name = (fields, older) if fields.values.get(older) is not None else (size, newer)
        limits.append(source.whole(name if name in source.values else older, 1, default=default))
    least, most = limits[0], min(limits[1], max_pixels or limits[1])
    if most < max(least, (patch * merge) ** 2):
        what = "images of Qwen2.5-VL have at least %d pixels, but at most %d are allowed"
        raise RefusedError(what % (max(least, (patch * merge) ** 2), most), "use a larger --max-pixels")
    token = config.whole("image_token_id", 0)
    found = Processing(QWEN, patch, token=token, merge=merge, window=window, **_common(fields))
    return replace(found, min_pixels=least, max_pixels=most)


def _tiled(vision: _Fields, fields: _Fields, token: int, tiles: int, colours: Colours = CLIP) -> Processing:
    tile = vision.whole("image_size", 1, SIDE)
    patch = vision.whole("patch_size", 1, tile)
    grids = tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7) if rows * columns <= tiles)
    return Processing(ONEVISION, patch, token=token, tile=tile, grids=grids, **_common(fields, colours))


def _pinpoints(config: _Fields, tile: int, tiles: int) -> Tuple[Tuple[int, int], ...]:
    listed = config.values.get("image_grid_pinpoints")
    grids: List[Tuple[int, int]] = []
    if not isinstance(listed, list) or len(listed) > 4096:
        raise RefusedError("%s: the field 'image_grid_pinpoints' is not a list of sizes" % config.where)
    for each in listed:
        sides = each if isinstance(each, list) and len(each) == 2 else [0, 0]
        if not all(isinstance(side, int) and 0 < side <= SIDE and side % tile == 0 for side in sides):
            what = "%s: image_grid_pinpoints has %s, not a height and a width that are multiples of %d"
            raise RefusedError(what % (config.where, str(each)[:40], tile))
        grid = (sides[0] // tile, sides[1] // tile)
        if grid[0] * grid[1] <= tiles:
            grids.append(grid)
    if not grids:
        what = "%s: image_grid_pinpoints has no size with at most %d tiles" % (config.where, tiles)
        raise RefusedError(what, "use a larger --max-tiles")
    return tuple(grids)
