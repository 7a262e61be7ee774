"""A model's shape from its ``config.json``, as transformers writes it.

Known are Llama and its like, Gemma 1 to 3, mixtures of experts (Mixtral, Qwen2-MoE, Qwen3-MoE) and models with a vision
tower (LLaVA, Qwen2-VL, Qwen2.5-VL, Gemma 3). The numbers of parameters equal those of transformers 5.6
(``tests/lm/test_plan_parameters.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Mapping, Sequence

from trainer.bounds import Bound
from trainer.plan.shape import PlanError, Shape

# model_type -> the template of LLaMA-Factory; the text models have Llama's architecture
_LIKE_LLAMA = {
    "llama": "llama3", "mistral": "mistral", "qwen2": "qwen", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "mixtral": "mistral", "qwen2_moe": "qwen", "qwen3_moe": "qwen3",
}  # fmt: skip
# model_type with a vision tower -> its text model's type, if text_config does not say it, and the template
_SEEING = {
    "llava": ("llama", "llava"), "qwen2_vl": ("qwen2", "qwen2_vl"), "qwen2_5_vl": ("qwen2", "qwen2_vl"),
    "gemma3": ("gemma3_text", "gemma3"),
}  # fmt: skip
_TEXTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"}
_GPT2 = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
_LLAMA = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
    "max_position_embeddings",
)
# What a text_config may omit: the defaults of transformers' classes.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "max_position_embeddings": 2048,
    },
    "gemma3_text": {
        "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "intermediate_size": 9216,
        "vocab_size": 262208, "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256,
    },
}  # fmt: skip
_EXPERTS = {
    "mixtral": ("num_local_experts", "num_experts_per_tok"),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
_TIED = ("gemma", "gemma2", "gemma3", "gemma3_text")  # each type's own default
_SIZE = Bound(low=1, high=100_000_000)  # of every number of a shape
_MAY = ("n_inner", "num_key_value_heads", "head_dim", "decoder_sparse_step")
_LAYERS = 10_000  # entries of mlp_only_layers


def parse(config: Dict[str, Any], where: str, name: str) -> Shape:
    """Return the shape that a ``config.json`` describes.

    Args:
        config: the parsed object.
        where: the file, for errors.
        name: the model's name.

    Raises:
        PlanError: keys are missing or not positive numbers, or the architecture is unknown.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        return _gpt2(config, where, name)
    if kind in _SEEING:
        return _seeing(config, where, name)
    if kind not in _LIKE_LLAMA:
        known = ", ".join(("gpt2", *_LIKE_LLAMA, *_SEEING))
        raise PlanError(
            f"{where}: unknown model_type {kind!r}",
            hint=f"known types: {known}; or name a known model of about its size",
        )
    return _llama(config, where, name, kind)


def _gpt2(config: Mapping[str, Any], where: str, name: str) -> Shape:
    _numbers(config, _GPT2, where)
    layers, hidden, heads, vocab, context = (config[key] for key in _GPT2)
    _divides(hidden, heads, where)
    inner = config.get("n_inner") or 4 * hidden
    tied, width = config.get("tie_word_embeddings", True), hidden // heads
    return Shape(
        *(name, "gpt2", layers, hidden, heads, heads, width, inner, vocab, context, tied), qkv_bias=True, kind="gpt2"
    )


def _llama(config: Mapping[str, Any], where: str, name: str, kind: Any) -> Shape:
    """The shape of a text model of Llama's architecture, with or without experts."""
    experts = _EXPERTS.get(kind, ())
    _numbers(config, (*_LLAMA, *experts), where)
    layers, hidden, heads, inner, vocab, context = (config[key] for key in _LLAMA)
    if config.get("head_dim") is None:
        _divides(hidden, heads, where)
    tied = config.get("tie_word_embeddings", kind in _TIED)
    bias = config.get("qkv_bias", True) if kind == "qwen2_moe" else config.get("attention_bias", kind == "qwen2")
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    sizes = (layers, hidden, heads, kv_heads, width, inner, vocab, context)
    fields: Dict[str, Any] = {
        "qkv_bias": bias,
        "template": _LIKE_LLAMA[kind],
        "qk_norm": kind in {"qwen3", "qwen3_moe", "gemma3_text"},
        "kind": kind,
        "norms": 4 if kind in {"gemma2", "gemma3_text"} else 2,
    }
    if experts:
        values = [config[key] for key in experts]
        fields.update({"experts": values[0], "chosen": min(values[:2]), "expert_inner": (*values, inner)[2]})
        fields["shared_inner"] = values[3] if len(values) > 3 else 0
        fields["dense_layers"] = _dense(config, layers)
    return Shape(name, "llama", *sizes, tied, **fields)


def _dense(config: Mapping[str, Any], layers: int) -> int:
    """Number of blocks without experts."""
    step, listed = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers")
    dense = set(listed[:_LAYERS]) if isinstance(listed, list) and all(isinstance(at, int) for at in listed) else set()
    return sum(at in dense or (at + 1) % step != 0 for at in range(min(layers, _LAYERS)))


def _seeing(config: Mapping[str, Any], where: str, name: str) -> Shape:
    """The shape of a text model with a vision tower. Older files have the text model's keys at the top."""
    kind = str(config["model_type"])
    default, template = _SEEING[kind]
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise PlanError(f"{where}: vision_config is missing")
    text = text if isinstance(text, Mapping) and text else config
    named = str(text.get("model_type", default)) if text is not config else default
    inner = _TEXTS.get(named, named)
    if inner not in _LIKE_LLAMA:
        raise PlanError(f"{where}: unknown model_type {inner!r} of text_config")
    text = {**_DEFAULTS.get(inner, {}), **text}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind in _TIED))
    shape = _llama({**text, "tie_word_embeddings": tied}, f"{where}: text_config", name, inner)
    return replace(shape, template=template, kind=kind, vision=_tower(kind, config, vision, shape.hidden, where))


def _tower(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], out: int, where: str) -> int:
    """Parameters of the vision tower and of the projector into a text model of width ``out``."""
    at = f"{where}: vision_config"
    if kind == "qwen2_vl":
        return _qwen2_vl(vision, out, at)
    if kind == "qwen2_5_vl":
        return _qwen2_5_vl(vision, at)
    width, inner, layers, image, patch = _values(
        vision, ("hidden_size", "intermediate_size", "num_hidden_layers", "image_size", "patch_size"), at
    )
    colours = vision.get("num_channels", 3)
    block = 4 * (width + 1) * width + 4 * width + (width + 1) * inner + (inner + 1) * width
    embedding, positions = colours * patch * patch * width, (image // patch) ** 2 * width
    if kind == "gemma3":  # SigLIP: a bias of the patches, one norm after the blocks, perhaps a head that pools
        head = width + block - 2 * width if vision.get("vision_use_head", True) else 0
        return int(embedding + width + positions + layers * block + 2 * width + head + width * out + width)
    # CLIP: a token of the class, norms before and after the blocks
    linear = 1 if config.get("multimodal_projector_bias", True) else 0
    chosen = config.get("vision_feature_layer")
    used = len(chosen) if isinstance(chosen, list) else 1
    projector = (used * width + linear) * out + (out + linear) * out
    return int(embedding + width + positions + width + 4 * width + layers * block + projector)


def _qwen2_vl(vision: Mapping[str, Any], out: int, where: str) -> int:
    width, layers, patch, merge, frames, ratio, colours = _values(
        {"spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 4, "in_channels": 3, **vision},
        (
            *("embed_dim", "depth", "patch_size", "spatial_merge_size", "temporal_patch_size"),
            "mlp_ratio",
            "in_channels",
        ),
        where,
    )
    inner, merged = ratio * width, width * merge * merge
    block = 4 * width + 4 * (width + 1) * width + (width + 1) * inner + (inner + 1) * width
    merger = 2 * width + (merged + 1) * merged + (merged + 1) * out
    return int(colours * frames * patch * patch * width + layers * block + merger)


def _qwen2_5_vl(vision: Mapping[str, Any], where: str) -> int:
    width, inner, layers, patch, merge, frames, out, colours = _values(
        {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "intermediate_size": 3420, **vision},
        (
            *("hidden_size", "intermediate_size", "depth", "patch_size", "spatial_merge_size", "temporal_patch_size"),
            *("out_hidden_size", "in_channels"),
        ),
        where,
    )
    merged = width * merge * merge
    block = 2 * width + 4 * (width + 1) * width + 2 * (width + 1) * inner + (inner + 1) * width
    merger = width + (merged + 1) * merged + (merged + 1) * out
    return int(colours * frames * patch * patch * width + layers * block + merger)


def _values(config: Mapping[str, Any], keys: Sequence[str], where: str) -> List[int]:
    _numbers(config, keys, where)
    return [config[key] for key in keys]


def _numbers(config: Mapping[str, Any], needed: Sequence[str], where: str) -> None:
    missing: List[str] = [key for key in needed if key not in config]
    if missing:
        raise PlanError(f"{where}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    for key in (*needed, *(key for key in _MAY if config.get(key) is not None)):
        if isinstance(config[key], bool) or not isinstance(config[key], int) or config[key] < 1:
            raise PlanError(f"{where}: {key}: {repr(config[key])[:40]} is not a positive whole number")
        if problem := _SIZE.problem(config[key]):
            raise PlanError(f"{where}: {key} {problem}")


def _divides(hidden: int, heads: int, where: str) -> None:
    if hidden % heads:
        raise PlanError(f"{where}: a width of {hidden} is not divisible by {heads} heads")
