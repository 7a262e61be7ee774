"""Reads the shape of a model from its ``config.json``, as transformers writes it.

A shape has no fields for the biases of attention's output (``attention_bias``) and of the MLP (``mlp_bias``). They are
less than a thousandth of a published model's parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from trainer.bounds import Bound
from trainer.plan.errors import PlanError
from trainer.plan.models import named
from trainer.plan.shape import Shape
from trainer.untrusted import LIMIT, UntrustedError, parse_object

# model_type -> the template of LLaMA-Factory; all have Llama's architecture
_LIKE_LLAMA = {"llama": "llama3", "mistral": "mistral", "qwen2": "qwen", "qwen3": "qwen3", "gemma": "gemma"}
_GPT2 = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
_LLAMA = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"),
    "max_position_embeddings",
)

_SIZE = Bound(low=1, high=100_000_000)  # of every number of a shape
_MAY = ("n_inner", "num_key_value_heads", "head_dim")


def load(model: str) -> Shape:
    """Load the shape of a ``config.json``, of a folder with one, or of a known name.

    Raises:
        PlanError: there is no such model, or its config.json is not usable.
    """
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise PlanError(f"{path} has no config.json", hint="name a model's folder, as save_pretrained writes it")
    if not file.exists():
        if model.endswith(".json") or model.startswith((".", "/")):
            raise PlanError(f"{file} does not exist")
        return named(model)
    try:
        with file.open("rb") as opened:
            config = parse_object(opened.read(LIMIT + 1))
    except UntrustedError as error:
        raise PlanError(f"{file} {error}") from error
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}") from error
    name = path.name if path.is_dir() else file.parent.resolve().name
    return parse(config, str(file), name)


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
    if kind != "gpt2" and kind not in _LIKE_LLAMA:
        raise PlanError(
            f"{where}: unknown model_type {kind!r}",
            hint=f"known types: gpt2, {', '.join(_LIKE_LLAMA)}; or name a known model of about its size",
        )
    needed = _GPT2 if kind == "gpt2" else _LLAMA
    _numbers(config, needed, where)
    if kind == "gpt2":
        layers, hidden, heads, vocab, context = (config[key] for key in _GPT2)
        _divides(hidden, heads, where)
        inner = config.get("n_inner") or 4 * hidden
        tied = config.get("tie_word_embeddings", True)
        width = hidden // heads
        return Shape(name, "gpt2", layers, hidden, heads, heads, width, inner, vocab, context, tied, qkv_bias=True)
    layers, hidden, heads, inner, vocab, context = (config[key] for key in _LLAMA)
    if config.get("head_dim") is None:
        _divides(hidden, heads, where)
    tied = config.get("tie_word_embeddings", kind == "gemma")  # each type's own default
    bias = config.get("attention_bias", kind == "qwen2")
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or hidden // heads
    template = _LIKE_LLAMA[str(kind)]
    sizes = (layers, hidden, heads, kv_heads, width, inner, vocab, context)
    return Shape(name, "llama", *sizes, tied, bias, template, kind == "qwen3")


def _numbers(config: Dict[str, Any], needed: Any, where: str) -> None:
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
