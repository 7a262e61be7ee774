"""A model of a vision tower and a language model, with a new projector between them: as LLaVA-OneVision begins."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator

import torch

from trainer.lm import families as texts
from trainer.lm import weights
from trainer.lm.errors import RefusedError
from trainer.lm.families import CONFIG
from trainer.lm.finetune import tokenizer_of
from trainer.lm.model import Named, sizes
from trainer.lm.shape import Shape
from trainer.vlm import families
from trainer.vlm.encoding import with_token
from trainer.vlm.processing import PREPROCESSOR, PROCESSOR, TILES, Processing, of_tower
from trainer.vlm.shape import VlmShape


@dataclass(frozen=True)
class Composed:
    """A model that does not exist yet: the folders of its tower and its language model, and its shape.

    ``tokenizer`` is its ``tokenizer.json``, which has the image token. ``processing`` is that of images.
    """

    vision: Path
    text: Path
    text_shape: Shape
    shape: VlmShape
    tokenizer: str
    processing: Processing

    def weights(self, seed: int, device: torch.device) -> Iterator[Named]:
        """Yield the weights of both folders, and new ones of the projector and of the line end.

        Equal seeds and device types give equal weights.

        Raises:
            RefusedError: weights are missing or have another shape.
        """
        yield from weights.read(self.text_shape, self.text)
        yield from weights.read(self.shape, self.vision, "tower.")
        yield from _new_weights(self.shape, seed, device)

    def kept(self) -> Dict[str, bytes]:
        """Return the small files of the new model: tokens as the language model's, images as the tower's.

        Raises:
            RefusedError: one of them cannot be read.
        """
        found = weights.read_kept(self.text)
        images = _preprocessor(self.shape, self.processing)
        processor = {
            "processor_class": "LlavaOnevisionProcessor",
            "image_token": self.processing.token_text,
            "num_image_tokens": self.processing.side**2,
            "vision_feature_select_strategy": "default" if self.shape.tower.has_class_token else "full",
        }
        contents = ((CONFIG, families.config_of(self.shape)), (PREPROCESSOR, images), (PROCESSOR, processor))
        for name, content in contents:
            found[name] = (json.dumps(content, indent=2) + "\n").encode()
        found["tokenizer.json"] = self.tokenizer.encode()
        return found


def compose(vision: Path, text: Path, image_token: str = "", tiles: int = TILES) -> Composed:
    """Describe a ``llava_onevision`` model of a SigLIP or CLIP folder and a language model's.

    Features are the output of the last layer of SigLIP, and of the last but one of CLIP, as LLaVA's. Images are cut
    into ``tiles`` tiles at most, 1 to 6 in each direction.

    Args:
        vision: a folder with a model of type ``siglip``, ``siglip_vision_model``, ``clip`` or ``clip_vision_model``.
        text: a folder with a model of type llama, qwen2 or qwen3.
        image_token: the token that stands for a feature of an image: a new one, or one that no text has; empty:
            ``<image>`` or ``<|image_pad|>``, and a new one if the tokenizer has neither.
        tiles: of an image, at most.

    Raises:
        RefusedError: config.json is missing, or describes another kind of model; or the token is none of the model.
    """
    text_shape = texts.read_shape(text)
    if isinstance(text_shape, VlmShape):
        raise RefusedError("--init %s has a vision tower already" % text, "remove --vision")
    path = vision / CONFIG
    tower = families.tower_of({"model_type": "", **texts.read_config(vision)}, path)
    if tower.has_class_token:
        tower = replace(tower, n_layer=families.layers_used(-2, tower.n_layer, path))
    shape = families.with_tower(text_shape, "llava_onevision", tower)
    unknown = replace(of_tower(tower, vision, tiles), token_text=image_token)
    tokenizer, token, processing = with_token(tokenizer_of(text), unknown)
    if processing.token >= text_shape.vocab_size:
        what = "the new token %s would be number %d, but %s has %d tokens"
        fix = "--image-token TOKEN, a token of its tokenizer.json that no text has"
        raise RefusedError(what % (token, processing.token, text, text_shape.vocab_size), fix)
    pinpoints = tuple((rows * tower.side, columns * tower.side) for rows, columns in processing.grids)
    shape = replace(shape, image_token=processing.token, pinpoints=pinpoints, tiles=tiles)
    return Composed(vision, text, text_shape, shape, tokenizer, replace(unknown, token_text=token))


def _new_weights(shape: VlmShape, seed: int, device: torch.device) -> Iterator[Named]:
    """Yield initial weights as transformers draws them, fp32."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, size in sizes(shape).items():
        if not name.startswith("projector."):
            continue
        is_newline = name == "projector.newline"
        if len(size) < 2 and not is_newline:
            yield name, torch.zeros(size, device=device)
            continue
        spread = 1 / math.sqrt(size[0]) if is_newline else 0.02
        yield name, torch.empty(size, device=device).normal_(0.0, spread, generator=generator)


def _preprocessor(shape: VlmShape, processing: Processing) -> Dict[str, Any]:
    """Return how transformers makes tiles of an image, with the colours of the tower's own file."""
    return {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "processor_class": "LlavaOnevisionProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_pad": True,
        "rescale_factor": 1 / 255,
        "resample": processing.resample,
        "size": {"height": shape.tower.side, "width": shape.tower.side},
        "image_grid_pinpoints": [list(each) for each in shape.pinpoints],
        "image_mean": list(processing.mean),
        "image_std": list(processing.std),
    }
