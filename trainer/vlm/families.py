"""How Hugging Face describes vision-language models: ``config.json``, and the names of parameters.

https://github.com/huggingface/transformers/tree/v5.6.0/src/transformers/models: ``llava_onevision``, ``qwen2_5_vl``,
``siglip`` and ``clip``. Names of parameters are those of the published models, which every version reads and which
version 5 writes. Files that version 4.52 or later wrote have other prefixes (``model.language_model``), and are read.

Our models have the layers of a tower up to the one whose output is used (``vision_feature_layer``), so an exported
folder has these, and -1. The last norm of SigLIP and CLIP is not used either: it is written as ones and zeros.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence, Tuple

from trainer.bounds import Bound
from trainer.lm import families
from trainer.lm.errors import RefusedError
from trainer.lm.families import CONFIG, Theirs, checked_number, checked_sizes
from trainer.lm.shape import Shape
from trainer.vlm.shape import KINDS, Tower, VlmShape

TOWERS = ("siglip", "siglip_vision_model", "clip", "clip_vision_model")
_FIX = "use the config.json that came with the weights"
_CLASSES = {
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu")
_VISION = "vision_tower.vision_model."
_DEFAULTS = {  # config.json has only what differs from these
    "siglip": {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "clip": {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}
_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "image_size": 224,
}  # fmt: skip
_QWEN = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
}  # fmt: skip


def read_shape(folder: Path) -> VlmShape:
    """Read the shape of the model in a Hugging Face folder.

    Raises:
        RefusedError: config.json is missing, or describes another kind of model.
    """
    return shape_of(families.read_config(folder), folder / CONFIG)


def shape_of(config: Mapping[str, Any], path: Path) -> VlmShape:
    """Return the shape that a ``config.json`` describes.

    Raises:
        RefusedError: another kind of model, or sizes that are missing or impossible.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise RefusedError("%s: a model of type %s; known are %s" % (path, kind, known), "use a model of these types")
    return _llava(config, path) if kind == "llava_onevision" else _qwen(config, path)


def _part(config: Mapping[str, Any], path: Path, name: str) -> Dict[str, Any]:
    part = config.get(name)
    if not isinstance(part, dict):
        raise RefusedError("%s has no %s" % (path, name), _FIX)
    return part


def _llava(config: Mapping[str, Any], path: Path) -> VlmShape:
    text, vision = _part(config, path, "text_config"), _part(config, path, "vision_config")
    text = {"model_type": "qwen2", **text}
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    if config.get("projector_hidden_act", "gelu") != "gelu":
        raise RefusedError("%s: the projector's activation %s is not gelu" % (path, config["projector_hidden_act"]))
    tower = tower_of(vision, path)
    strategy = config.get("vision_feature_select_strategy", "full")
    if strategy != _strategy(tower):
        what = "%s: vision_feature_select_strategy %s with a tower of %s" % (path, strategy, tower.kind)
        raise RefusedError(what, "use a model with %s: all patches, no class token" % _strategy(tower))
    tower = replace(tower, n_layer=layers_used(config.get("vision_feature_layer", -1), tower.n_layer, path))
    shape = with_tower(families.shape_of(text, path), "llava_onevision", tower)
    return replace(
        shape,
        image_token=_token(config, path, "image_token_index", "image_token_id", shape.vocab_size, 151646),
        projector_bias=bool(config.get("multimodal_projector_bias", True)),
        pinpoints=_pinpoints(config.get("image_grid_pinpoints"), tower.side, path),
        tiles=_tiles(config.get("vision_aspect_ratio", "anyres_max_9"), path),
    )


def _strategy(tower: Tower) -> str:
    """All patches and only these are features."""
    return "default" if tower.has_class_token else "full"


def layers_used(layer: Any, layers: int, path: Path) -> int:
    """Return how many layers run for the output of layer ``layer``, counted from the end if negative.

    Raises:
        RefusedError: there is no such layer.
    """
    used = layers + 1 + layer if type(layer) is int and layer < 0 else layer
    if type(used) is not int or not 1 <= used <= layers:
        what = "%s: vision_feature_layer %r is no layer of a tower with %d" % (path, layer, layers)
        raise RefusedError(what, "use a model whose features are the output of one layer, such as -1 or -2")
    return used


def _token(config: Mapping[str, Any], path: Path, name: str, other: str, vocabulary: int, default: int) -> int:
    token = config.get(name, config.get(other, default))
    if type(token) is not int or not 0 <= token < vocabulary:
        raise RefusedError("%s: %s %r is no token of %d" % (path, name, token, vocabulary), _FIX)
    return token


_MOST_PINPOINTS = 1000


def _pinpoints(points: Any, side: int, path: Path) -> Tuple[Tuple[int, int], ...]:
    """Check the sizes at which images are cut into tiles. None: 1 to 6 tiles in each direction, as transformers."""
    if points is None:
        return tuple((side * rows, side * columns) for rows in range(1, 7) for columns in range(1, 7))
    sides = Bound(low=1, high=1 << 16)
    is_list = isinstance(points, list) and 0 < len(points) <= _MOST_PINPOINTS
    found = [point if isinstance(point, list) else [] for point in points] if is_list else [[]]
    for point in found:
        if len(point) != 2 or any(type(each) is not int or not sides.allows(each) or each % side for each in point):
            what = "%s: image_grid_pinpoints has %r, which is no height and width in tiles of %d" % (path, point, side)
            raise RefusedError(what, _FIX)
    return tuple((height, width) for height, width in found)


def _tiles(ratio: Any, path: Path) -> int:
    found = re.fullmatch(r"anyres_max_(\d{1,4})", str(ratio))
    if not found or not int(found[1]):
        raise RefusedError("%s: vision_aspect_ratio %s; known is anyres_max_N" % (path, ratio), _FIX)
    return int(found[1])


def with_tower(text: Shape, kind: str, tower: Tower) -> VlmShape:
    """Return the shape of a model of a decoder and a tower.

    Raises:
        RefusedError: the decoder is a GPT-2.
    """
    if text.is_gpt2:
        raise RefusedError("a decoder of type gpt2 cannot be part of a %s model" % kind, "use llama, qwen2 or qwen3")
    return VlmShape(**{name: getattr(text, name) for name in text.__dataclass_fields__}, kind=kind, tower=tower)


def tower_of(config: Mapping[str, Any], path: Path) -> Tower:
    """Return the tower that a SigLIP or CLIP ``config.json`` describes, or the part of one that is about images.

    Raises:
        RefusedError: another kind of model, or sizes that are missing or impossible.
    """
    kind = config.get("model_type", "siglip_vision_model")
    if kind not in TOWERS:
        known = ", ".join(TOWERS)
        raise RefusedError("%s: a tower of type %s; known are %s" % (path, kind, known), "use a tower of these types")
    if kind in ("siglip", "clip"):
        config = _part(config, path, "vision_config")
    family = str(kind).partition("_")[0]
    merged = {**_BASE, **_DEFAULTS[family], **config}
    found = checked_sizes(merged, path, *_BASE, "patch_size")
    width, heads = found["hidden_size"], found["num_attention_heads"]
    _check_heads(width, heads, 1, path)
    if found["image_size"] < found["patch_size"]:
        what = "%s: image_size %d is smaller than a patch, %d" % (path, found["image_size"], found["patch_size"])
        raise RefusedError(what, _FIX)
    if merged["hidden_act"] not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise RefusedError("%s: activation %s; known are %s" % (path, merged["hidden_act"], known), _FIX)
    return Tower(
        kind=family,
        n_layer=found["num_hidden_layers"],
        n_head=heads,
        n_embd=width,
        inner=found["intermediate_size"],
        patch=found["patch_size"],
        side=found["image_size"],
        channels=found["num_channels"],
        norm_eps=checked_number(merged, path, "layer_norm_eps", 1e-6, Bound(above=0, high=1)),
        activation=str(merged["hidden_act"]),
    )


def _check_heads(width: int, heads: int, of: int, path: Path) -> None:
    if width % heads or width // heads % of:
        what = "%s: hidden_size %d is not %d heads of a multiple of %d" % (path, width, heads, of)
        raise RefusedError(what, _FIX)


def _qwen(config: Mapping[str, Any], path: Path) -> VlmShape:
    text = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **config, **(config.get("text_config") or {})}  # flat before v4.52
    scaling = dict(text.pop("rope_parameters", None) or text.pop("rope_scaling", None) or {})
    text.pop("rope_scaling", None)
    sections = scaling.pop("mrope_section", None)
    kind = str(scaling.pop("rope_type", None) or scaling.get("type", "default"))
    scaling.pop("type", None)
    scaling["rope_type"] = "default" if kind == "mrope" else kind
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    plain = {**text, "model_type": "qwen2", "rope_parameters": scaling, "tie_word_embeddings": tied}
    decoder = families.shape_of(plain, path)
    is_list = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not is_list or min(sections) < 0 or 2 * sum(sections) != decoder.head:
        what = "%s: mrope_section %r is no three parts of the %d pairs of a head" % (path, sections, decoder.head // 2)
        raise RefusedError(what, _FIX)
    assert decoder.rope
    decoder = replace(decoder, rope=replace(decoder.rope, sections=tuple(sections)))
    shape = with_tower(decoder, "qwen2_5_vl", _qwen_tower(config, path, decoder.n_embd))
    return replace(shape, image_token=_token(config, path, "image_token_id", "", shape.vocab_size, 151655))


def _qwen_tower(config: Mapping[str, Any], path: Path, width_of_text: int) -> Tower:
    vision = {**_QWEN, **_part(config, path, "vision_config")}
    if "in_chans" in vision:  # its name in the published models
        vision["in_channels"] = vision["in_chans"]
    found = checked_sizes(vision, path, *_QWEN)
    _check_heads(found["hidden_size"], found["num_heads"], 4, path)
    out = vision.get("out_hidden_size", width_of_text)
    if out != width_of_text:
        raise RefusedError("%s: out_hidden_size %r is not hidden_size %d" % (path, out, width_of_text), _FIX)
    if vision.get("hidden_act", "silu") != "silu":
        raise RefusedError("%s: the tower's activation %s is not silu" % (path, vision["hidden_act"]), _FIX)
    square = found["patch_size"] * found["spatial_merge_size"]
    if found["window_size"] % square:
        what = "%s: window_size %d must be a multiple of %d" % (path, found["window_size"], square)
        raise RefusedError(what, _FIX)
    whole = vision.get("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(whole, list) or any(type(each) is not int or not 0 <= each < found["depth"] for each in whole):
        what = "%s: fullatt_block_indexes %r are no layers of a tower with %d" % (path, whole, found["depth"])
        raise RefusedError(what, _FIX)
    return Tower(
        kind="qwen2_5_vl",
        n_layer=found["depth"],
        n_head=found["num_heads"],
        n_embd=found["hidden_size"],
        inner=found["intermediate_size"],
        patch=found["patch_size"],
        side=0,
        channels=found["in_channels"],
        frames=found["temporal_patch_size"],
        merge=found["spatial_merge_size"],
        window=found["window_size"],
        whole=tuple(whole),
        activation="silu",
    )


_VISION_PARTS = {
    "norm": "pre_layrnorm",
    "places": "embeddings.position_embedding",
    "patch": "embeddings.patch_embedding",
    "norm1": "encoder.layers.%s.layer_norm1",
    "norm2": "encoder.layers.%s.layer_norm2",
    "attention.out": "encoder.layers.%s.self_attn.out_proj",
    "mlp.up": "encoder.layers.%s.mlp.fc1",
    "mlp.down": "encoder.layers.%s.mlp.fc2",
}
_QWEN_PARTS = {
    "patch": "patch_embed.proj",
    "norm1": "blocks.%s.norm1",
    "norm2": "blocks.%s.norm2",
    "attention.qkv": "blocks.%s.attn.qkv",
    "attention.out": "blocks.%s.attn.proj",
    "mlp.down": "blocks.%s.mlp.down_proj",
}
_PROJECTORS = {
    "llava_onevision": {"up": "multi_modal_projector.linear_1", "down": "multi_modal_projector.linear_2"},
    "qwen2_5_vl": {"norm": "visual.merger.ln_q", "up": "visual.merger.mlp.0", "down": "visual.merger.mlp.2"},
}
_OURS = re.compile(r"tower\.(?:layers\.(?P<layer>\d+)\.)?(?P<part>.+)\.(?P<kind>weight|bias)")


def theirs(shape: VlmShape, name: str) -> Tuple[Theirs, ...]:
    """See ``Format``."""
    if name == "projector.newline":
        return (Theirs("image_newline"),)
    if name.startswith("projector."):
        part, kind = name.split(".")[1:]
        return (Theirs("%s.%s" % (_PROJECTORS[shape.kind][part], kind)),)
    if name.startswith("tower."):
        return _of_tower(shape.tower, name)
    prefix = "language_model." if shape.kind == "llava_onevision" else ""
    return tuple(each._replace(name=prefix + each.name) for each in families.theirs(shape, name))


def _of_tower(tower: Tower, name: str) -> Tuple[Theirs, ...]:
    if name == "tower.start":
        return (Theirs(_VISION + "embeddings.class_embedding"),)
    found = _OURS.fullmatch(name)
    assert found, name
    layer, part, kind = found["layer"] or "", found["part"], found["kind"]
    is_qwen, width, inner = tower.kind == "qwen2_5_vl", tower.n_embd, tower.inner
    prefix, names = ("visual.", _QWEN_PARTS) if is_qwen else (_VISION, _VISION_PARTS)
    if part == "attention.qkv" and not is_qwen:
        at = "%sencoder.layers.%s.self_attn." % (prefix, layer)
        return tuple(Theirs("%s%s_proj.%s" % (at, which, kind), i * width, width) for i, which in enumerate("qkv"))
    if part == "mlp.up" and is_qwen:
        at = "%sblocks.%s.mlp." % (prefix, layer)
        pair = enumerate(("gate", "up"))
        return tuple(Theirs("%s%s_proj.%s" % (at, which, kind), i * inner, inner) for i, which in pair)
    theirs = prefix + (names[part] % layer if layer else names[part]) + "." + kind
    frames = (tower.frames,) if is_qwen else ()
    is_convolution = part == "patch" and kind == "weight"
    size = (width, tower.channels, *frames, tower.patch, tower.patch) if is_convolution else ()
    return (Theirs(theirs, size=size),)


_RENAMED: Dict[str, Tuple[Tuple[str, str], ...]] = {
    "llava_onevision": (
        (r"(?:model\.)?(?:vision_tower\.)?(?:vision_model\.)?(embeddings|encoder|pre_layrnorm)\.", _VISION + r"\1."),
        (r"model\.language_model\.", "language_model.model."),
        (r"lm_head\.", "language_model.lm_head."),
        (r"model\.(multi_modal_projector|image_newline)", r"\1"),
    ),
    "qwen2_5_vl": ((r"model\.visual\.", "visual."), (r"model\.language_model\.", "model.")),
}


def stored_name(shape: VlmShape, name: str) -> str:
    """See ``Format``. A tower alone, in a folder of SigLIP or CLIP, has the names of a tower in a model."""
    for pattern, new in _RENAMED[shape.kind]:
        if re.match(pattern, name):
            return re.sub("^" + pattern, new, name)
    return name


def adapted(shape: VlmShape, names: Sequence[str]) -> Tuple[Any, Dict[str, str]]:
    """See ``Format``. The tower has matrices of the same names, which have no adapters."""
    prefix = "language_model.model." if shape.kind == "llava_onevision" else "model."
    now = {name: "model.language_model." + name[len(prefix) :] for name in names}
    targets, _ = families.adapted(shape, names)
    return r"model\.language_model\..*\.(%s)" % "|".join(targets), now


def unused(shape: VlmShape) -> Dict[str, Tuple[Tuple[int, ...], float]]:
    """See ``Format``. The last norm is after the output that is used."""
    if shape.kind == "qwen2_5_vl":
        return {}
    norm = _VISION + "post_layernorm."
    return {norm + "weight": ((shape.tower.n_embd,), 1.0), norm + "bias": ((shape.tower.n_embd,), 0.0)}


def config_of(shape: VlmShape) -> Dict[str, Any]:
    """See ``Format``."""
    text, tower = families.config_of(shape), shape.tower
    del text["architectures"]
    common = {"architectures": [_CLASSES[shape.kind]], "model_type": shape.kind, "tie_word_embeddings": shape.tied}
    sizes = {"hidden_size": tower.n_embd, "intermediate_size": tower.inner, "patch_size": tower.patch}
    vision: Dict[str, Any] = {**sizes, "hidden_act": tower.activation}
    if shape.kind == "qwen2_5_vl":
        text.update(model_type="qwen2_5_vl_text")
        if shape.rope:
            scaling = text["rope_scaling"] or {"rope_type": "default"}
            text["rope_scaling"] = {**scaling, "mrope_section": list(shape.rope.sections)}
        vision.update(
            model_type="qwen2_5_vl",
            depth=tower.n_layer,
            num_heads=tower.n_head,
            in_channels=tower.channels,
            spatial_merge_size=tower.merge,
            temporal_patch_size=tower.frames,
            window_size=tower.window,
            fullatt_block_indexes=list(tower.whole),
            out_hidden_size=shape.n_embd,
        )
        return {**common, "text_config": text, "vision_config": vision, "image_token_id": shape.image_token}
    vision.update(
        model_type=tower.kind + "_vision_model",
        num_hidden_layers=tower.n_layer,
        num_attention_heads=tower.n_head,
        num_channels=tower.channels,
        image_size=tower.side,
        layer_norm_eps=tower.norm_eps,
        vision_use_head=False,
    )
    return {
        **common,
        "text_config": text,
        "vision_config": vision,
        "image_token_index": shape.image_token,
        "video_token_index": shape.image_token,  # this model has none, but it must be a token
        "image_grid_pinpoints": [list(point) for point in shape.pinpoints],
        "vision_aspect_ratio": "anyres_max_%d" % shape.tiles,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": _strategy(tower),
        "multimodal_projector_bias": shape.projector_bias,
        "projector_hidden_act": "gelu",
    }


def updated(shape: VlmShape, config: Mapping[str, Any]) -> Dict[str, Any]:
    """See ``Format``. A tower of SigLIP or CLIP ends with the layer whose output is used."""
    if shape.kind == "qwen2_5_vl":
        return dict(config)
    vision = {**config["vision_config"], "num_hidden_layers": shape.tower.n_layer, "vision_use_head": False}
    return {**config, "vision_config": vision, "vision_feature_layer": -1}
