"""Opens images with Pillow, within bounds, and makes patches of them."""

from __future__ import annotations

import base64
import binascii
import io
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Tuple, Union
from urllib.parse import unquote, urlsplit

import numpy as np

from trainer.lm.errors import RefusedError
from trainer.vlm.grids import Grid, layout_of
from trainer.vlm.processing import QWEN, Processing

BYTES = 256 << 20  # of an image's file, at most
PIXELS = 100_000_000  # of an image, at most
RATIO = 200  # of an image's sides, at most: Qwen2.5-VL's limit
NAME = 4096  # characters of a path, at most
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # JPEG includes the MPO of phones
TAIL = 1 << 16  # bytes at the end of a JPEG in which its end marker must be
ORIENTATION = 0x0112  # EXIF's tag
# What EXIF's values mean, in the names of Pillow's ``Transpose``: as ``PIL.ImageOps.exif_transpose``.
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
TURNED = (5, 6, 7, 8)  # height and width are exchanged
# What a damaged image makes Pillow raise.
ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error)


@dataclass(frozen=True)
class Reference:
    """Where an image is: a path, or the bytes of its file. A relative path is one of the folder of images."""

    at: Union[str, bytes]

    def name(self) -> str:
        """Return its name in messages."""
        return "the image %s" % self.at[:200] if isinstance(self.at, str) else "an image of %d bytes" % len(self.at)


def reference(value: Any, place: str) -> Reference:
    """Return where a record says that an image is.

    Args:
        value: a path, a URL with ``file:`` or ``data:``, or an object with ``bytes`` or ``path``.
        place: of the record, for messages.

    Raises:
        RefusedError: it is none of these.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return Reference(value)
    if not isinstance(value, str) or not value:
        raise RefusedError("%s: an image is neither a path nor bytes" % place)
    if value.startswith("data:"):
        return Reference(_decoded(value, place))
    scheme = value.partition("://")[0] if "://" in value[:16] else ""
    if scheme and scheme != "file":
        what = "%s: the image %s is on another machine" % (place, value[:200])
        raise RefusedError(what, "download it, and write its path into the record")
    path = unquote(urlsplit(value).path) if scheme else value
    if len(path) > NAME or "\0" in path or not path:
        raise RefusedError("%s: the image's path %r is not a path" % (place, path[:200]))
    return Reference(path)


def _decoded(url: str, place: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise RefusedError("%s: an image's data: URL is not base64" % place)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError("%s: an image's data: URL is not base64: %s" % (place, error)) from error


def size_of(image: Reference, folder: Path, place: str, decodes: bool = False) -> Tuple[int, int]:
    """Return the height and width of an image, and check that its file is whole.

    Args:
        image: to open.
        folder: of relative paths.
        place: of the record, for messages.
        decodes: whether every image is decoded. Otherwise, JPEG and PNG are not, and only damage to their ends, or to
            any byte of a PNG, is found.

    Raises:
        RefusedError: the image cannot be opened.
    """
    height, width = _opened(image, folder, place, _decoded_size if decodes else _checked_size)
    return height, width


def pixels_of(image: Reference, folder: Path, size: Tuple[int, int], place: str) -> Any:
    """Return an image in RGB, as Pillow has it.

    Raises:
        RefusedError: the image cannot be opened, or has no longer this height and width. The message names ``place``.
    """

    def decoded(found: Any, _: IO[bytes]) -> Any:
        now = _size(found)
        if now != size:
            raise ValueError("it has %d x %d pixels, and had %d x %d before" % (*now[::-1], *size[::-1]))
        return _rgb(found)

    return _opened(image, folder, place, decoded)


def _opened(image: Reference, folder: Path, place: str, use: Any) -> Any:
    pillow = _pillow()
    try:
        with _file(image, folder) as file, pillow.open(file, formats=FORMATS) as found:
            height, width = found.height, found.width
            if height * width > PIXELS:
                raise ValueError("it has %d x %d pixels, more than %d million" % (width, height, PIXELS // 10**6))
            if max(height, width) > RATIO * min(height, width):
                raise ValueError("it has %d x %d pixels: one side is over %d times the other" % (width, height, RATIO))
            if found.mode == "F":
                raise ValueError("its pixels are fractions")
            return use(found, file)
    except ERRORS as error:
        shown = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if type(error).__name__ == "UnidentifiedImageError":
            shown = "its format is none of %s" % ", ".join(FORMATS)
        what = "%s: %s cannot be read: %s" % (place, image.name(), shown[:300])
        raise RefusedError(what, "replace the image, or leave such records out with --skip-wrong") from error


def _pillow() -> Any:
    try:
        from PIL import Image  # noqa: PLC0415 - only for images
    except ImportError as error:
        raise RefusedError("the package Pillow is not installed", "pip install pillow") from error
    Image.MAX_IMAGE_PIXELS = None  # _opened has its own limit, which raises no warnings
    return Image


def _file(image: Reference, folder: Path) -> IO[bytes]:
    if isinstance(image.at, bytes):
        _check_bytes(len(image.at))
        return io.BytesIO(image.at)
    path = folder / image.at
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe would never end
        raise ValueError("it is not a file")
    _check_bytes(found.st_size)
    return path.open("rb")


def _check_bytes(size: int) -> None:
    if not size:
        raise ValueError("it is empty")
    if size > BYTES:
        raise ValueError("it has more than %d MiB" % (BYTES >> 20))


def _checked_size(found: Any, file: IO[bytes]) -> Tuple[int, int]:
    size = _size(found)
    if found.format in ("JPEG", "MPO"):
        start = file.tell()  # of the pixels, after a small picture that EXIF may have
        file.seek(max(start, file.seek(0, io.SEEK_END) - TAIL))
        if b"\xff\xd9" not in file.read(TAIL):
            raise ValueError("the file is truncated")
    elif found.format == "PNG":
        found.verify()  # compares checksums
    else:
        found.load()
    return size


def _decoded_size(found: Any, _: IO[bytes]) -> Tuple[int, int]:
    size = _size(found)
    found.load()
    return size


def _size(found: Any) -> Tuple[int, int]:
    height, width = found.height, found.width
    return (width, height) if _orientation(found) in TURNED else (height, width)


def _orientation(found: Any) -> int:
    """Return EXIF's orientation, from the header only: Pillow would decode a PNG to look for it at the end."""
    if found.format == "PNG" and "exif" not in found.info:
        return 1
    try:
        return int(found.getexif().get(ORIENTATION, 1))
    except ERRORS:
        return 1  # damaged EXIF is no reason to leave an image out


def _rgb(found: Any) -> Any:
    """Return the first frame, upright and in RGB. Transparency is dropped, as transformers does it."""
    turn = TURNS.get(_orientation(found))
    if found.mode.startswith("I"):  # 16 bits of grey, of which convert() would keep the lowest 8
        grey = np.asarray(found).astype(np.int64) >> 8
        image = _pillow().fromarray(np.clip(grey, 0, 255).astype(np.uint8)).convert("RGB")
    elif found.mode == "P" and "transparency" in found.info:
        image = found.convert("RGBA").convert("RGB")
    else:
        image = found.convert("RGB")
    return image.transpose(getattr(_pillow().Transpose, turn)) if turn else image


def patches_of(processing: Processing, grid: Grid, image: Any) -> Any:
    """Return the patches of an image in RGB, (patches, numbers of a patch), float32, in the order of ``grid``."""
    if processing.kind == QWEN:
        row, column = layout_of(processing, grid).positions.T
        cut = _cut(image.resize((grid.width, grid.height), processing.resample), processing.patch)[row, column]
    else:
        cut = np.concatenate([_cut(tile, processing.patch) for tile in _tiles_of(processing, grid, image)])
    mean, std = (np.array(each, dtype=np.float32).reshape(3, 1) for each in (processing.mean, processing.std))
    patches = np.multiply(cut.reshape(grid.patches, 3, -1), 1 / (255 * std), dtype=np.float32)
    patches -= mean / std
    return patches.reshape(grid.patches, -1)


def _tiles_of(processing: Processing, grid: Grid, image: Any) -> Any:
    tile = processing.tile
    if not grid.rows:
        yield _square(processing, image).resize((tile, tile), processing.resample)
        return
    yield image.resize((tile, tile), processing.resample)
    high, wide = grid.rows * tile, grid.columns * tile
    padded = _pillow().new("RGB", (wide, high))
    fitted = image.resize((grid.width, grid.height), processing.resample)
    padded.paste(fitted, ((wide - grid.width) // 2, (high - grid.height) // 2))
    for top in range(0, high, tile):
        for left in range(0, wide, tile):
            yield padded.crop((left, top, left + tile, top + tile))


def _square(processing: Processing, image: Any) -> Any:
    """Pad an image to a square with the mean colour."""
    side = max(image.size)
    padded = _pillow().new("RGB", (side, side), tuple(int(each * 255) for each in processing.mean))
    padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return padded


def _cut(image: Any, patch: int) -> Any:
    """Cut an image into patches: (rows, columns, colours, height, width)."""
    rows, columns = image.height // patch, image.width // patch
    pixels = np.asarray(image)[: rows * patch, : columns * patch]
    return pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
