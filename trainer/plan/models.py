"""The shapes of models: by name, or from a ``config.json`` as transformers writes it.

A shape determines a model's parameters, activations and arithmetic. It has no fields for the biases of attention's
output (``attention_bias``) and of the MLP (``mlp_bias``), less than a thousandth of a published model's parameters.

The known models have the sizes of their published ``config.json``. Their numbers of parameters equal those of
transformers' models (``tests/lm/test_plan_parameters.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List

from trainer.agent.contract.untrusted import LIMIT, UntrustedError, parse_object
from trainer.bounds import Bound


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Attributes:
        name: the usual name.
        family: ``gpt2`` (LayerNorm, biases, learned positions, GELU) or ``llama`` (RMSNorm, rotary, SwiGLU).
        layers: how many blocks.
        hidden: width of the residual stream.
        heads: of attention.
        kv_heads: heads of keys and values; fewer than ``heads`` with grouped-query attention.
        head_dim: width of a head.
        intermediate: width inside the MLP.
        vocab: tokens of the vocabulary.
        context: positions that the model supports.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases (Qwen2, GPT-2).
        template: LLaMA-Factory's template.
        qk_norm: queries and keys have norms (Qwen3), one weight per unit of a head.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    qkv_bias: bool = False
    template: str = "default"
    qk_norm: bool = False

    @property
    def attention_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters of one block's matrices."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        return attention + (2 if self.family == "gpt2" else 3) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        biases = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        if self.family == "gpt2":
            return self.layer_matrices + biases + self.hidden + self.intermediate + self.hidden + 4 * self.hidden
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matrices + biases + norms

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, the positions and a separate output layer."""
        positions = self.context * self.hidden if self.family == "gpt2" else 0
        return self.vocab * self.hidden * (1 if self.tied else 2) + positions

    @property
    def parameters(self) -> int:
        """All parameters."""
        last_norm = self.hidden * (2 if self.family == "gpt2" else 1)
        return self.embeddings + self.layers * self.layer_parameters + last_norm

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of ``rank`` for every matrix of the blocks: rank x (in + out) each.

        GPT-2 has one matrix for queries, keys and values.
        """
        attention = 2 * (self.hidden + self.attention_width) + 2 * (self.hidden + self.kv_width)
        if self.family == "gpt2":
            attention = 2 * self.hidden + 2 * self.attention_width + 2 * self.kv_width
        mlp = (2 if self.family == "gpt2" else 3) * (self.hidden + self.intermediate)
        return self.layers * rank * (attention + mlp)

    def flops(self, seq: int) -> float:
        """Floating-point operations per token of a forward pass: 2 per parameter that multiplies, and attention's.

        Three times that is the usual 6 N + 12 L H Q T of PaLM's appendix B (arXiv 2204.02311), causal or not.
        """
        return self.head_flops + self.layers * (2.0 * self.layer_matrices + 4.0 * self.attention_width * seq)

    @property
    def head_flops(self) -> float:
        """Operations of the output layer alone."""
        return 2.0 * self.vocab * self.hidden


class PlanError(ValueError):
    """A model, cluster or batch that cannot be planned. ``hint`` says what to type or change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


_EXPERTS = re.compile(r"-a\d+(?:\.\d+)?b\b|-moe\b|x\d+b\b")  # qwen3-30b-a3b, mixtral-8x7b


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Shape:
    return Shape(name, "gpt2", layers, hidden, heads, heads, 64, 4 * hidden, 50257, 1024, tied=True, qkv_bias=True)


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, context: int) -> Shape:
    template = {32000: "llama2", 128256: "llama3", 32768: "mistral"}[vocab]
    template = "default" if context == 2048 else template  # the first Llama has no template
    return Shape(name, "llama", layers, hidden, heads, kv, 128, inner, vocab, context, tied=False, template=template)


def _qwen(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, *, tied: bool) -> Shape:
    width = hidden // heads
    return Shape(name, "llama", layers, hidden, heads, kv, width, inner, vocab, 32768, tied, True, "qwen")


def _llama3(name: str, layers: int, hidden: int, heads: int, inner: int, *, width: int = 128, tied: bool) -> Shape:
    context = 131072
    return Shape(name, "llama", layers, hidden, heads, 8, width, inner, 128256, context, tied, template="llama3")


def _qwen3(name: str, layers: int, hidden: int, heads: int, inner: int, *, tied: bool) -> Shape:
    vocab, context = 151936, 40960
    return Shape(name, "llama", layers, hidden, heads, 8, 128, inner, vocab, context, tied, False, "qwen3", True)


MODELS: Dict[str, Shape] = {
    each.name: each
    for each in (
        # huggingface.co/openai-community; layers and widths: "Language Models are Unsupervised Multitask Learners",
        # table 2, whose numbers of parameters (117 M to 1542 M) differ from those of the published models
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        # huggingface.co/meta-llama; Llama 3's: arXiv 2407.21783, table 3, where the vocabulary is rounded to 128,000
        # the first Llama: huggingface.co/huggyllama, arXiv 2302.13971, table 2 (33B is 30b there)
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048),
        _llama("llama-30b", 60, 6656, 52, 52, 17920, 32000, 2048),
        _llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama3("llama-3.1-8b", 32, 4096, 32, 14336, tied=False),
        _llama3("llama-3.1-70b", 80, 8192, 64, 28672, tied=False),
        _llama3("llama-3.1-405b", 126, 16384, 128, 53248, tied=False),
        _llama3("llama-3.2-1b", 16, 2048, 32, 8192, width=64, tied=True),
        _llama3("llama-3.2-3b", 28, 3072, 24, 8192, tied=True),
        _llama3("llama-3.3-70b", 80, 8192, 64, 28672, tied=False),
        # huggingface.co/Qwen; arXiv 2412.15115, table 1. Positions of the Instruct models; the base models' config.json
        # says 131072 from 7B on
        _qwen("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True),
        _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _qwen("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, tied=True),
        _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, tied=False),
        _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, tied=False),
        _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, tied=False),
        _qwen("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, tied=False),
        # huggingface.co/Qwen; arXiv 2505.09388, table 1: the dense ones
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288, tied=False),
        _qwen3("qwen3-14b", 40, 5120, 40, 17408, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 64, 25600, tied=False),
        # huggingface.co/mistralai/Mistral-7B-v0.3; the paper, arXiv 2310.06825, describes v0.1, with 32000 tokens
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32768, 32768),
    )
}


def named(name: str) -> Shape:
    """Return the shape of a known name, in any case, with or without the hub's owner and a suffix.

    Raises:
        PlanError: the name is unknown.
    """
    word = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-", "")
    if _EXPERTS.search(word):
        raise PlanError(
            f"{name} is a mixture of experts, which plan does not support: the experts' memory depends on the program",
            hint="name a dense model such as qwen3-32b",
        )
    fitting = [key for key in MODELS if word == key or word.startswith(f"{key}-")]
    if not fitting:
        raise PlanError(
            f"unknown model {name}: neither a config.json nor a known name",
            hint=f"name a folder with a config.json, or one of {', '.join(MODELS)}",
        )
    return MODELS[max(fitting, key=len)]


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
