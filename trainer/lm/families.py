"""How Hugging Face describes our models: ``config.json``, and the names and layouts of parameters.

https://github.com/huggingface/transformers/tree/v4.57.0/src/transformers/models, ``modeling_gpt2.py``,
``modeling_llama.py``, ``modeling_qwen2.py`` and ``modeling_qwen3.py``. transformers 5 writes ``rope_parameters``
instead of ``rope_theta`` and ``rope_scaling``; both are read, and what both versions read is written.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional, Protocol, Sequence, Tuple

from trainer.bounds import Bound
from trainer.lm.errors import RefusedError
from trainer.lm.shape import FAMILIES, Rope, Shape
from trainer.vlm import shape as vision

CONFIG = "config.json"
_SIZE = Bound(low=1, high=1 << 24)
_FIX = "use the config.json that came with the weights"
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class Theirs(NamedTuple):
    """A parameter of Hugging Face: its part of ours starts at row ``start`` and has ``rows`` rows (0: all).

    ``turned``: their matrix is the transpose of ours (Conv1D). ``size``: theirs, if it has other dimensions than ours:
    a convolution over patches is a matrix.
    """

    name: str
    start: int = 0
    rows: int = 0
    turned: bool = False
    size: Tuple[int, ...] = ()


class Format(Protocol):
    """How Hugging Face stores a kind of models: this module, and ``trainer.vlm.families``."""

    def theirs(self, shape: Any, name: str) -> Tuple[Theirs, ...]:
        """Return the parameters of Hugging Face that make up one of ours."""

    def adapted(self, shape: Any, names: Sequence[str]) -> Tuple[Any, Dict[str, str]]:
        """Return peft's ``target_modules`` for the modules of stored matrices, and transformers' name of each."""

    def stored_name(self, shape: Any, name: str) -> str:
        """Return the name that ``theirs`` has for a tensor of a file."""

    def config_of(self, shape: Any) -> Dict[str, Any]:
        """Return the ``config.json`` of a shape, without tokens and data type."""

    def updated(self, shape: Any, config: Mapping[str, Any]) -> Dict[str, Any]:
        """Return the ``config.json`` that the model came with, as it is now."""

    def unused(self, shape: Any) -> Dict[str, Tuple[Tuple[int, ...], float]]:
        """Return size and value of the parameters that Hugging Face expects, but that change no output."""


_GPT2 = {
    "embed": "transformer.wte",
    "places": "transformer.wpe",
    "norm": "transformer.ln_f",
    "norm1": "transformer.h.%s.ln_1",
    "norm2": "transformer.h.%s.ln_2",
    "attention.qkv": "transformer.h.%s.attn.c_attn",
    "attention.out": "transformer.h.%s.attn.c_proj",
    "mlp.up": "transformer.h.%s.mlp.c_fc",
    "mlp.down": "transformer.h.%s.mlp.c_proj",
}
_LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "norm1": "model.layers.%s.input_layernorm",
    "norm2": "model.layers.%s.post_attention_layernorm",
    "attention.out": "model.layers.%s.self_attn.o_proj",
    "attention.q_norm": "model.layers.%s.self_attn.q_norm",
    "attention.k_norm": "model.layers.%s.self_attn.k_norm",
    "mlp.down": "model.layers.%s.mlp.down_proj",
}
_OURS = re.compile(r"(?:layers\.(?P<layer>\d+)\.)?(?P<part>.+)\.(?P<kind>weight|bias)")


def theirs(shape: Shape, name: str) -> Tuple[Theirs, ...]:
    """Return the parameters of Hugging Face that make up one of ours."""
    found = _OURS.fullmatch(name)
    assert found, name
    layer, part, kind = found["layer"] or "", found["part"], found["kind"]
    if shape.is_gpt2:
        turned = kind == "weight" and part.startswith(("attention", "mlp"))
        return (Theirs(_filled(_GPT2[part], layer) + "." + kind, turned=turned),)
    if part == "attention.qkv":
        q, each = shape.n_head * shape.head, shape.kv_heads * shape.head
        rows = (("q", 0, q), ("k", q, each), ("v", q + each, each))
        at = "model.layers.%s.self_attn." % layer
        return tuple(Theirs("%s%s_proj.%s" % (at, which, kind), start, count) for which, start, count in rows)
    if part == "mlp.up":
        at = "model.layers.%s.mlp." % layer
        names = ("gate", "up")
        return tuple(
            Theirs("%s%s_proj.%s" % (at, which, kind), i * shape.inner, shape.inner) for i, which in enumerate(names)
        )
    return (Theirs(_filled(_LLAMA[part], layer) + "." + kind),)


def stored_name(shape: Shape, name: str) -> str:
    """See ``Format``."""
    del shape
    return name


def adapted(shape: Shape, names: Sequence[str]) -> Tuple[Any, Dict[str, str]]:
    """See ``Format``."""
    del shape
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names)), {name: name for name in names}


def updated(shape: Shape, config: Mapping[str, Any]) -> Dict[str, Any]:
    """See ``Format``. A training may use fewer positions of GPT-2."""
    return {**config, **({"n_positions": shape.block_size, "n_ctx": shape.block_size} if shape.is_gpt2 else {})}


def unused(shape: Shape) -> Dict[str, Tuple[Tuple[int, ...], float]]:
    """See ``Format``."""
    del shape
    return {}


def _filled(name: str, layer: str) -> str:
    return name % layer if layer else name


def earlier_name(name: str) -> str:
    """Return the name that a parameter of GPT-2 has in checkpoints of format 1 and 2."""
    return theirs(Shape(1, 1, 1, 1, 1), name)[0].name


# Sizes as published, from config.json of each model at https://huggingface.co.
PUBLISHED = {
    "gpt2": Shape(12, 12, 768, 1024, 50257),
    "gpt2-medium": Shape(24, 16, 1024, 1024, 50257),
    "gpt2-large": Shape(36, 20, 1280, 1024, 50257),
    "gpt2-xl": Shape(48, 25, 1600, 1024, 50257),
}


def _published(
    name: str, family: str, sizes: Tuple[int, ...], theta: float, tied: bool, rope: Optional[Rope] = None
) -> None:
    layers, heads, kv_heads, head, width, inner, positions, vocabulary = sizes
    PUBLISHED[name] = Shape(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=positions,
        vocab_size=vocabulary,
        family=family,
        n_kv_head=kv_heads,
        head_width=head,
        n_inner=inner,
        norm_eps=1e-5 if family == "llama" else 1e-6,
        tied=tied,
        qkv_bias=family == "qwen2",
        out_bias=False,
        mlp_bias=False,
        rope=replace(rope or Rope(original=positions), theta=theta),
    )


_LLAMA_31 = Rope(kind="llama3", factor=8.0, original=8192)
_LLAMA_32 = Rope(kind="llama3", factor=32.0, original=8192)
# Layers, heads, heads of keys and values, head width, width, inner width, positions, vocabulary.
_published("llama-3-8b", "llama", (32, 32, 8, 128, 4096, 14336, 8192, 128256), 5e5, tied=False)
_published("llama-3.1-8b", "llama", (32, 32, 8, 128, 4096, 14336, 131072, 128256), 5e5, tied=False, rope=_LLAMA_31)
_published("llama-3.2-1b", "llama", (16, 32, 8, 64, 2048, 8192, 131072, 128256), 5e5, tied=True, rope=_LLAMA_32)
_published("llama-3.2-3b", "llama", (28, 24, 8, 128, 3072, 8192, 131072, 128256), 5e5, tied=True, rope=_LLAMA_32)
_published("qwen2.5-0.5b", "qwen2", (24, 14, 2, 64, 896, 4864, 32768, 151936), 1e6, tied=True)
_published("qwen2.5-3b", "qwen2", (36, 16, 2, 128, 2048, 11008, 32768, 151936), 1e6, tied=True)
_published("qwen2.5-7b", "qwen2", (28, 28, 4, 128, 3584, 18944, 131072, 152064), 1e6, tied=False)
_published("qwen3-0.6b", "qwen3", (28, 16, 8, 128, 1024, 3072, 40960, 151936), 1e6, tied=True)
_published("qwen3-8b", "qwen3", (36, 32, 8, 128, 4096, 12288, 40960, 151936), 1e6, tied=False)


def named(model: str) -> Optional[Shape]:
    """Return the shape that ``--model`` names: a published size or a folder with ``config.json``; None for ``custom``.

    Raises:
        RefusedError: there is no such size and no such folder, or it describes an unknown architecture.
    """
    if model == "custom":
        return None
    if model in PUBLISHED:
        return PUBLISHED[model]
    if not (Path(model) / CONFIG).is_file():
        known = ", ".join(("custom", *PUBLISHED))
        raise RefusedError("--model %s: no such size, and no folder with config.json" % model, "sizes: %s" % known)
    return read_shape(Path(model))


def read_config(folder: Path) -> Dict[str, Any]:
    """Read the ``config.json`` of a folder.

    Raises:
        RefusedError: it is missing or no JSON object.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = "%s cannot be read: %s" % (path, error)
        raise RefusedError(what, "name a folder with config.json and weights") from error
    if not isinstance(config, dict):
        raise RefusedError("%s is not a JSON object" % path, _FIX)
    return config


def read_shape(folder: Path) -> Shape:
    """Read the shape of the model in a Hugging Face folder.

    Raises:
        RefusedError: config.json is missing, or describes another kind of model.
    """
    return shape_of(read_config(folder), folder / CONFIG)


def shape_of(config: Mapping[str, Any], path: Path) -> Shape:
    """Return the shape that a ``config.json`` describes.

    Raises:
        RefusedError: another kind of model, or sizes that are missing or impossible.
    """
    family = config.get("model_type", "gpt2")
    if family in vision.KINDS:
        from trainer.vlm import families as of_vision  # noqa: PLC0415 - it imports this module

        return of_vision.shape_of(config, path)
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, *vision.KINDS))
        raise RefusedError("%s: a model of type %s; known are %s" % (path, family, known), "use a model of these types")
    return _gpt2(config, path) if family == "gpt2" else _llama(config, path, str(family))


def checked_sizes(config: Mapping[str, Any], path: Path, *names: str) -> Dict[str, int]:
    """Return sizes of a ``config.json``.

    Raises:
        RefusedError: one is missing, no whole number, or too large.
    """
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise RefusedError("%s has no %s" % (path, ", ".join(missing)), _FIX)
    found = {}
    for name in names:
        size = config[name]
        if type(size) is not int or not _SIZE.allows(size):
            raise RefusedError("%s: %s %r must be %s" % (path, name, size, _SIZE), _FIX)
        found[name] = size
    return found


def checked_number(config: Mapping[str, Any], path: Path, name: str, default: float, bound: Bound) -> float:
    """Return a number of a ``config.json``, or ``default`` without one.

    Raises:
        RefusedError: it is none, or outside of ``bound``.
    """
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not bound.allows(value):
        raise RefusedError("%s: %s %r must be %s" % (path, name, value, bound), _FIX)
    return float(value)


def _gpt2(config: Mapping[str, Any], path: Path) -> Shape:
    positions = config.get("n_positions", config.get("n_ctx"))
    found = checked_sizes({**config, "n_positions": positions}, path, "n_layer", "n_head", "n_embd", "vocab_size")
    block = checked_sizes({"n_positions": positions}, path, "n_positions")["n_positions"]
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        what = "%s: activation %s is not GPT-2's" % (path, config["activation_function"])
        raise RefusedError(what, "use a GPT-2 folder")
    _check_multiple(path, found["n_embd"], found["n_head"], "n_embd", "n_head")
    return Shape(found["n_layer"], found["n_head"], found["n_embd"], block, found["vocab_size"])


def _llama(config: Mapping[str, Any], path: Path, family: str) -> Shape:
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings", "vocab_size")
    found = checked_sizes(config, path, *names, "intermediate_size")
    layers, heads, width, positions, vocabulary = (found[name] for name in names)
    kv_heads = checked_sizes({"num_key_value_heads": heads, **config}, path, "num_key_value_heads")[
        "num_key_value_heads"
    ]
    _check_multiple(path, heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    if config.get("head_dim") is None:
        _check_multiple(path, width, heads, "hidden_size", "num_attention_heads")
        head = width // heads
    else:
        head = checked_sizes(config, path, "head_dim")["head_dim"]
    _check_multiple(path, head, 2, "head_dim", "2")
    if config.get("hidden_act", "silu") != "silu":
        raise RefusedError("%s: activation %s is not silu" % (path, config["hidden_act"]), "use a model with SwiGLU")
    if config.get("use_sliding_window"):
        raise RefusedError("%s: sliding-window attention is not supported" % path, "use a model without it")
    biased = bool(config.get("attention_bias", False))
    return Shape(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        block_size=positions,
        vocab_size=vocabulary,
        family=family,
        n_kv_head=kv_heads,
        head_width=head,
        n_inner=found["intermediate_size"],
        norm_eps=checked_number(config, path, "rms_norm_eps", 1e-6, Bound(above=0, high=1)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or biased,
        out_bias=family != "qwen2" and biased,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        rope=_rope(config, path, positions),
    )


def _check_multiple(path: Path, value: int, of: int, name: str, of_name: str) -> None:
    if value % of:
        raise RefusedError("%s: %s %d must be a multiple of %s %d" % (path, name, value, of_name, of), _FIX)


def _rope(config: Mapping[str, Any], path: Path, positions: int) -> Rope:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise RefusedError("%s: rope_scaling is not an object" % path, _FIX)
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in _KINDS:
        raise RefusedError("%s: RoPE of type %s; known are %s" % (path, kind, ", ".join(_KINDS)), "use another model")
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise RefusedError("%s: partial rotary positions are not supported" % path, "use another model")
    theta = checked_number(
        {"rope_theta": 10000.0, **config, **scaling}, path, "rope_theta", 1e4, Bound(above=1, high=1e12)
    )
    base = Rope(theta=theta, kind=kind, original=positions)
    if kind == "default":
        return base
    above = Bound(above=0, high=1e6)

    def number(name: str, default: float, bound: Bound = above) -> float:
        return checked_number(scaling, path, name, default, bound)

    originals = {"original_max_position_embeddings": positions, **config, **scaling}
    original = checked_sizes(originals, path, "original_max_position_embeddings")["original_max_position_embeddings"]
    attention = scaling.get("attention_factor")
    return replace(
        base,
        factor=number("factor", 1.0, Bound(low=1, high=1e6)),
        original=positions if kind == "dynamic" else original,
        low_freq_factor=number("low_freq_factor", 1.0),
        high_freq_factor=number("high_freq_factor", 4.0),
        beta_fast=number("beta_fast", 32.0),
        beta_slow=number("beta_slow", 1.0),
        attention_factor=None if attention is None else number("attention_factor", 1.0),
        mscale=number("mscale", 0.0, Bound(low=0, high=1e6)),
        mscale_all_dim=number("mscale_all_dim", 0.0, Bound(low=0, high=1e6)),
        truncate=bool(scaling.get("truncate", True)),
    )


def config_of(shape: Shape) -> Dict[str, Any]:
    """Return the ``config.json`` of a shape, without tokens and data type."""
    kind: Dict[str, Any] = {"architectures": [_CLASSES[shape.family]], "model_type": shape.family}
    if shape.is_gpt2:
        sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd}
        fixed = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
        positions = {"n_positions": shape.block_size, "n_ctx": shape.block_size, "vocab_size": shape.vocab_size}
        return {**kind, **sizes, **positions, **fixed}
    rope = shape.rope or Rope()
    found = {
        **kind,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": shape.block_size,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
    }
    if shape.family == "llama":
        return {**found, "attention_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias}
    more = {"use_sliding_window": False}
    return {**found, **more, "attention_bias": shape.qkv_bias} if shape.family == "qwen3" else {**found, **more}


_SCALED = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def _scaling(rope: Rope) -> Optional[Dict[str, Any]]:
    if rope.kind == "default":
        return None
    found: Dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rope.original
    unset = ("attention_factor", "mscale", "mscale_all_dim")
    values = {name: getattr(rope, name) for name in _SCALED[rope.kind]}
    return {**found, **{name: value for name, value in values.items() if value or name not in unset}}
